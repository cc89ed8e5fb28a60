// Whether an operator of the device is being called, whose numbers are those of all that it calls.
#pragma once

namespace fakecuda {

bool is_within_operator();

}  // namespace fakecuda

// Empty: nothing of this header is needed.
#pragma once

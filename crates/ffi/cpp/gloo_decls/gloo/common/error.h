// Empty: libtorch's ProcessGroupGloo.hpp includes this header of gloo, but uses nothing of it. See ../../README.md.
#pragma once

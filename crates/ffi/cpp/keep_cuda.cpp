// Keeps libtorch_cuda in every program that links this crate; compiled wherever libtorch has it, with CUDA's headers or
// without.

namespace {

// at::cuda::getDeviceProperties(signed char), by its name in the library: its declaration needs CUDA's headers.
extern "C" void od_of_libtorch_cuda(void) noexcept asm("_ZN2at4cuda19getDevicePropertiesEa");

// With the linker's --as-needed, a plain tch program does not load libtorch_cuda and then finds no GPU. The same
// happens to a program that calls nothing of this crate, because --gc-sections drops unreachable code. Constructors are
// always kept, and this one needs a symbol of that library.
__attribute__((constructor)) void keep_libtorch_cuda() noexcept {
  [[maybe_unused]] static const void* volatile kept;
  kept = reinterpret_cast<const void*>(&od_of_libtorch_cuda);
}

}  // namespace

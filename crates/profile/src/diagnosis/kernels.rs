//! The names of GPU work, and of the CUDA calls that launch it, in libtorch's profiler.
//!
//! # Source
//! kineto's `CuptiActivity.cpp` and `cupti_strings.cpp`; the names of cuBLAS' and cuDNN's kernels come from traces

/// Calls by which the host waits for the device.
const WAITS: [&str; 5] =
    ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"];
/// Calls that return when the copy is done, if it is of pageable memory: libtorch's own wait behind them finds nothing
/// left to wait for.
///
/// # Source
/// "API synchronization behavior" in the reference of the CUDA runtime
const COPIES: [&str; 2] = ["cudaMemcpyAsync", "cudaMemcpy2DAsync"];
/// A call that takes longer than this, in seconds, has not only put a copy into a stream: the same bound as for operators
/// that are mostly overhead.
const LONGEST_COPY_CALL: f64 = 10e-6;
/// Calls that ask whether work is done.
const POLLS: [&str; 2] = ["cudaEventQuery", "cudaStreamQuery"];
/// Calls that get memory of the device from the driver, or give it back.
const DEVICE_MEMORY: [&str; 7] =
    ["cudaMalloc", "cudaFree", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"];
/// The same for pinned memory.
const PINNED_MEMORY: [&str; 5] =
    ["cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister"];
/// Calls that launch kernels.
const LAUNCHES: [&str; 7] = [
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
];

/// A call's name without the suffix for a version or kind of stream: `cudaStreamSynchronize_v3020`.
fn call(name: &str) -> &str {
    name.split('_').next().unwrap_or(name)
}

/// Whether it is a CUDA call, not an operator.
pub(crate) fn is_call(name: &str) -> bool {
    let rest = name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu"));
    rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}

pub(super) fn waits(name: &str) -> bool {
    WAITS.contains(&call(name))
}

pub(super) fn polls(name: &str) -> bool {
    POLLS.contains(&call(name))
}

pub(super) fn is_device_memory(name: &str) -> bool {
    DEVICE_MEMORY.contains(&call(name))
}

pub(super) fn is_pinned_memory(name: &str) -> bool {
    PINNED_MEMORY.contains(&call(name))
}

/// Whether a call that copies, which takes so many seconds by itself, has waited for its copy of pageable memory.
pub(super) fn waits_for_copy(name: &str, seconds: f64) -> bool {
    COPIES.contains(&call(name)) && seconds > LONGEST_COPY_CALL
}

pub(super) fn launches(name: &str) -> bool {
    LAUNCHES.contains(&call(name))
}

/// `Memcpy HtoD (Pageable -> Device)`.
pub(super) fn copies_to_device(name: &str) -> bool {
    name.starts_with("Memcpy HtoD")
}

pub(super) fn copies_from_pageable(name: &str) -> bool {
    name.starts_with("Memcpy HtoD (Pageable")
}

/// `Memcpy DtoH (Device -> Pageable)`, or the other way.
pub(super) fn copies_pageable(name: &str) -> bool {
    copies_from_pageable(name) || name.starts_with("Memcpy DtoH (Device -> Pageable")
}

/// `Memcpy DtoH (Device -> Pinned)`.
pub(super) fn copies_to_host(name: &str) -> bool {
    name.starts_with("Memcpy DtoH")
}

/// Whether a kernel computes float32 matrix products or convolutions without tensor cores.
pub(super) fn is_float32_product(name: &str) -> bool {
    let name = name.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    // cuDNN's convolutions have `scudnn` in their names, CUTLASS' kernels without tensor cores `simt`.
    let is_product = has(&["gemm", "fprop", "dgrad", "wgrad", "scudnn", "winograd"]);
    let is_single = has(&["sgemm", "scudnn", "f32f32_f32f32", "simt", "<float,"]);
    // `s1688gemm`, `f32f32_tf32f32`, `tensorop`: tensor cores.
    let is_other = has(&["tf32", "tensorop", "bf16", "bfloat16", "fp16", "__half", "f16f16"]);
    is_product && is_single && !is_other
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float32_kernels_are_distinguished_from_tensor_core_kernels() {
        for name in [
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
            "ampere_sgemm_128x64_tn",
            "volta_sgemm_32x128_nt",
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm_256x128_8x4_nn_align1::Params)",
            "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 6, 7, false, cublasGemvTensorStridedBatched<float const>>(..)",
            "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, ..)",
            "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
            "_5x_cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
            "sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x128x8_stage3",
            "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, ..)",
        ] {
            assert!(is_float32_product(name), "{name}");
        }
        for name in [
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage3_warpsize2x2x1_tensor16x8x8_kernel",
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(..)",
            "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
            "nvjet_tst_128x24_64x11_2x1_v_bz_TNT",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off",
            "void implicit_convolve_sgemm<__half, __half, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, ..)",
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(..)",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(..)",
            "Memcpy DtoD (Device -> Device)",
        ] {
            assert!(!is_float32_product(name), "{name}");
        }
    }

    #[test]
    fn calls_are_recognised_with_their_suffixes() {
        for name in ["cudaStreamSynchronize", "cudaStreamSynchronize_ptsz", "cudaEventSynchronize_v3020", "cudaMemcpy"]
        {
            assert!(waits(name) && is_call(name), "{name}");
        }
        for name in ["cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaEventQuery", "aten::copy_"] {
            assert!(!waits(name), "{name}");
        }
        for name in ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch"] {
            assert!(launches(name) && is_call(name), "{name}");
        }
        assert!(
            !launches("cudaLaunchHostFunc") && !is_call("aten::mm") && !is_call("cumsum") && !is_call("cuda_graph")
        );
        assert!(copies_from_pageable("Memcpy HtoD (Pageable -> Device)"));
        assert!(!copies_from_pageable("Memcpy HtoD (Pinned -> Device)"));
        assert!(copies_to_device("Memcpy HtoD (Pinned -> Device)") && copies_to_host("Memcpy DtoH (Device -> Pinned)"));
        assert!(!copies_to_device("Memcpy DtoD (Device -> Device)") && !copies_to_host("Memset (Device)"));
    }
}

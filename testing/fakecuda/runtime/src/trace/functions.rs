//! The numbers of the runtime's functions in CUPTI's records.

/// Names without underscores before them, sorted, and their numbers in cupti_runtime_cbid.h of CUDA 13.0.
#[rustfmt::skip]
const NUMBERS: [(&str, u32); 92] = [
    ("cudaDeviceCanAccessPeer", 154), ("cudaDeviceDisablePeerAccess", 156), ("cudaDeviceEnablePeerAccess", 155),
    ("cudaDeviceGetAttribute", 200), ("cudaDeviceGetDefaultMemPool", 372), ("cudaDeviceGetMemPool", 386),
    ("cudaDeviceGetPCIBusId", 174), ("cudaDeviceGetStreamPriorityRange", 205), ("cudaDeviceSynchronize", 165),
    ("cudaDriverGetVersion", 1), ("cudaEventCreate", 133), ("cudaEventCreateWithFlags", 134), ("cudaEventDestroy", 136),
    ("cudaEventElapsedTime", 486), ("cudaEventQuery", 138), ("cudaEventRecord", 135), ("cudaEventRecordWithFlags", 370),
    ("cudaEventSynchronize", 137), ("cudaFree", 22), ("cudaFreeAsync", 375), ("cudaFreeHost", 26),
    ("cudaFuncGetAttributes", 15), ("cudaFuncSetAttribute", 273), ("cudaGetDevice", 17), ("cudaGetDeviceCount", 3),
    ("cudaGetDeviceProperties", 440), ("cudaGetDriverEntryPointByVersion", 468), ("cudaGetErrorName", 209),
    ("cudaGetErrorString", 12), ("cudaGetLastError", 10), ("cudaGetSymbolAddress", 53), ("cudaGetSymbolSize", 54),
    ("cudaGraphDebugDotPrint", 408), ("cudaGraphDestroy", 314), ("cudaGraphExecDestroy", 313),
    ("cudaGraphExecUpdate", 335), ("cudaGraphGetNodes", 322), ("cudaGraphInstantiate", 443),
    ("cudaGraphInstantiateWithFlags", 418), ("cudaGraphLaunch", 311), ("cudaGraphNodeGetDependencies", 456),
    ("cudaHostAlloc", 27), ("cudaHostRegister", 152), ("cudaHostUnregister", 153), ("cudaIpcCloseMemHandle", 180),
    ("cudaIpcGetEventHandle", 176), ("cudaIpcGetMemHandle", 178), ("cudaIpcOpenEventHandle", 177),
    ("cudaIpcOpenMemHandle", 179), ("cudaLaunchCooperativeKernel", 269), ("cudaLaunchHostFunc", 284),
    ("cudaLaunchKernel", 211), ("cudaLaunchKernelExC", 430), ("cudaMalloc", 20), ("cudaMallocAsync", 373),
    ("cudaMallocFromPoolAsync", 391), ("cudaMemGetInfo", 30), ("cudaMemPoolGetAttribute", 379),
    ("cudaMemPoolSetAccess", 380), ("cudaMemPoolSetAttribute", 378), ("cudaMemPoolTrimTo", 377), ("cudaMemcpy", 31),
    ("cudaMemcpy2DAsync", 44), ("cudaMemcpyAsync", 41), ("cudaMemcpyFromSymbol", 40), ("cudaMemcpyPeerAsync", 161),
    ("cudaMemcpyToSymbol", 39), ("cudaMemcpyToSymbolAsync", 47), ("cudaMemset", 49), ("cudaMemsetAsync", 51),
    ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", 210),
    ("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 251), ("cudaPeekAtLastError", 11),
    ("cudaPointerGetAttributes", 151), ("cudaProfilerStart", 171), ("cudaProfilerStop", 172),
    ("cudaRuntimeGetVersion", 2), ("cudaSetDevice", 16), ("cudaStreamAddCallback", 197),
    ("cudaStreamBeginCapture", 315), ("cudaStreamCreate", 129), ("cudaStreamCreateWithFlags", 198),
    ("cudaStreamCreateWithPriority", 202), ("cudaStreamDestroy", 201), ("cudaStreamEndCapture", 319),
    ("cudaStreamGetCaptureInfo", 461), ("cudaStreamGetPriority", 203), ("cudaStreamIsCapturing", 317),
    ("cudaStreamQuery", 132), ("cudaStreamSynchronize", 131), ("cudaStreamWaitEvent", 147),
    ("cudaThreadExchangeStreamCaptureMode", 327),
];

/// That of `cudaLaunchKernel`.
pub const LAUNCH: u32 = 211;
/// That of `cudaMemcpy`, which waits.
pub const COPY: u32 = 31;

/// A function's number, if it has one.
pub fn number(name: &str) -> Option<u32> {
    let name = name.trim_start_matches('_');
    NUMBERS.binary_search_by_key(&name, |(name, _)| name).ok().map(|at| NUMBERS[at].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_is_found_by_its_name() {
        assert!(NUMBERS.iter().all(|(name, own)| number(name) == Some(*own)), "they are sorted");
        let found = ["cudaLaunchKernel", "__cudaLaunchKernel", "cudaMemcpy", "cublasSgemm_v2"].map(number);
        assert_eq!(found, [Some(LAUNCH), Some(LAUNCH), Some(COPY), None]);
    }
}

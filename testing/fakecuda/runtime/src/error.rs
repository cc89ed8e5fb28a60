//! The runtime's error codes.

/// A code of `cudaError_t`; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaError(pub i32);

macro_rules! errors {
    ($($constant:ident = $code:literal, $name:literal, $text:literal;)+) => {
        impl CudaError {
            $(
                #[allow(dead_code, reason = "the words of each are looked up by its number, which a test may plant")]
                #[doc = $text]
                pub const $constant: Self = Self($code);
            )+

            /// What `cudaGetErrorName` says, and `cudaGetErrorString`, each with a zero byte at its end.
            pub fn words(self) -> (&'static str, &'static str) {
                match self.0 {
                    $($code => (concat!($name, "\0"), concat!($text, "\0")),)+
                    _ => ("unrecognized error code\0", "unrecognized error code\0"),
                }
            }
        }
    };
}

impl CudaError {
    /// Whether it is one of the codes 900 to 908, which say what a capture refuses.
    pub fn is_of_captures(self) -> bool {
        (Self::CAPTURE_UNSUPPORTED.0..=Self::CAPTURE_WRONG_THREAD.0).contains(&self.0)
    }

    /// Whether every later call fails with it, too: driver_types.h says of these that the process is left in an
    /// inconsistent state, and has to be terminated to use CUDA again.
    pub fn is_sticky(self) -> bool {
        matches!(self.0, 226 | 700 | 702 | 710 | 714..=719 | 721 | 911)
    }
}

errors! {
    SUCCESS = 0, "cudaSuccess", "no error";
    INVALID_VALUE = 1, "cudaErrorInvalidValue", "invalid argument";
    MEMORY_ALLOCATION = 2, "cudaErrorMemoryAllocation", "out of memory";
    INVALID_CONFIGURATION = 9, "cudaErrorInvalidConfiguration", "invalid configuration argument";
    INVALID_SYMBOL = 13, "cudaErrorInvalidSymbol", "invalid device symbol";
    DEVICES_UNAVAILABLE = 46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable";
    MISSING_CONFIGURATION = 52, "cudaErrorMissingConfiguration", "__global__ function call is not configured";
    INVALID_DEVICE_FUNCTION = 98, "cudaErrorInvalidDeviceFunction", "invalid device function";
    NO_DEVICE = 100, "cudaErrorNoDevice", "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "cudaErrorInvalidDevice", "invalid device ordinal";
    DEVICE_UNINITIALIZED = 201, "cudaErrorDeviceUninitialized", "invalid device context";
    ECC_UNCORRECTABLE = 214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered";
    CONTAINED = 226, "cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error";
    FILE_NOT_FOUND = 301, "cudaErrorFileNotFound", "file not found";
    OPERATING_SYSTEM = 304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS";
    INVALID_RESOURCE_HANDLE = 400, "cudaErrorInvalidResourceHandle", "invalid resource handle";
    ILLEGAL_STATE = 401, "cudaErrorIllegalState", "the operation cannot be performed in the present state";
    NOT_READY = 600, "cudaErrorNotReady", "device not ready";
    ILLEGAL_ADDRESS = 700, "cudaErrorIllegalAddress", "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated";
    PEER_ALREADY_ENABLED = 704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled";
    PEER_NOT_ENABLED = 705, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled";
    ASSERT = 710, "cudaErrorAssert", "device-side assert triggered";
    HOST_NOT_REGISTERED = 713, "cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region";
    STACK_ERROR = 714, "cudaErrorHardwareStackError", "hardware stack error";
    ILLEGAL_INSTRUCTION = 715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716, "cudaErrorMisalignedAddress", "misaligned address";
    INVALID_ADDRESS_SPACE = 717, "cudaErrorInvalidAddressSpace",
        "operation not supported on global/shared address space";
    INVALID_PC = 718, "cudaErrorInvalidPc", "invalid program counter";
    LAUNCH_FAILURE = 719, "cudaErrorLaunchFailure", "unspecified launch failure";
    TENSOR_MEMORY_LEAK = 721, "cudaErrorTensorMemoryLeak", "tensor memory not completely freed";
    NOT_PERMITTED = 800, "cudaErrorNotPermitted", "operation not permitted";
    NOT_SUPPORTED = 801, "cudaErrorNotSupported", "operation not supported";
    CAPTURE_UNSUPPORTED = 900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901, "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture";
    CAPTURE_MERGE = 902, "cudaErrorStreamCaptureMerge",
        "operation would result in a merge of separate capture sequences";
    CAPTURE_UNMATCHED = 903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began";
    CAPTURE_UNJOINED = 904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work";
    CAPTURE_ISOLATION = 905, "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream";
    CAPTURE_IMPLICIT = 906, "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = 908, "cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread";
    GRAPH_UPDATE_FAILURE = 910, "cudaErrorGraphExecUpdateFailure",
        "the graph update was not performed because it included changes which violated constraints specific to \
        instantiated graph update";
    EXTERNAL_DEVICE = 911, "cudaErrorExternalDevice", "an async error has occured in external entity outside of CUDA";
    UNKNOWN = 999, "cudaErrorUnknown", "unknown error";
}

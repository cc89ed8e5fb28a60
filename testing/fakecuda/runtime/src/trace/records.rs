//! CUPTI's activity records, as cupti_activity.h of CUDA 13 has them. They are packed there, too.

/// A record: plain numbers without padding, whose first one is its kind.
///
/// # Safety
/// Each byte of the type has to belong to a field that may hold any bits.
pub unsafe trait Record: Copy {
    /// The bytes that a buffer takes.
    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the trait's condition: every byte is part of a number.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<Self>()) }.to_vec()
    }
}

pub const MEMCPY: u32 = 1;
pub const MEMSET: u32 = 2;
pub const RUNTIME: u32 = 5;
pub const CONCURRENT_KERNEL: u32 = 10;
pub const MEMCPY2: u32 = 22;
pub const SYNCHRONIZATION: u32 = 38;
pub const EXTERNAL_CORRELATION: u32 = 39;
/// One more than the largest kind.
pub const KINDS: u32 = 56;

/// `CUpti_ActivityKernel10`.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Kernel {
    pub kind: u32,
    pub caches: [u8; 2],
    pub registers: u16,
    pub global_caches: [u32; 2],
    pub start: u64,
    pub end: u64,
    pub completed: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub static_shared: i32,
    pub dynamic_shared: i32,
    pub local_memory: [u32; 2],
    pub correlation: u32,
    pub grid_id: i64,
    /// The address of the kernel's name.
    pub name: usize,
    pub reserved: usize,
    pub queued: u64,
    pub submitted: u64,
    pub launch_type: [u8; 4],
    pub shared_executed: u32,
    pub graph_node: u64,
    pub shared_limit: u32,
    pub graph: u32,
    pub access_policy: usize,
    pub channel: [u32; 2],
    pub cluster: [u32; 4],
    pub local_memory_total: u64,
    pub max_clusters: [u32; 2],
    pub is_device_launched: [u8; 8],
}

/// `CUpti_ActivityMemcpy6`.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Copy6 {
    pub kind: u32,
    pub copy_kind: u8,
    pub from_kind: u8,
    pub to_kind: u8,
    pub flags: u8,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub correlation: u32,
    pub runtime_correlation: u32,
    pub pad: u32,
    pub reserved: usize,
    pub graph_node: u64,
    pub graph: u32,
    pub channel: [u32; 2],
    pub is_device_launched: [u8; 4],
    pub copies: u64,
}

/// `CUpti_ActivityMemcpyPtoP4`: a copy between two devices.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct PeerCopy {
    pub kind: u32,
    pub copy_kind: u8,
    pub from_kind: u8,
    pub to_kind: u8,
    pub flags: u8,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    /// Device and context.
    pub from: [u32; 2],
    pub to: [u32; 2],
    pub correlation: u32,
    pub reserved: usize,
    pub graph_node: u64,
    pub graph: u32,
    pub channel: [u32; 2],
    /// The record is aligned to 8 bytes.
    pub tail: u32,
}

/// `CUpti_ActivityMemset4`.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Fill {
    pub kind: u32,
    pub value: u32,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub correlation: u32,
    pub flags: u16,
    pub memory_kind: u16,
    pub pad: u32,
    pub reserved: usize,
    pub graph_node: u64,
    pub graph: u32,
    pub channel: [u32; 2],
    pub is_device_launched: [u8; 4],
}

/// `CUpti_ActivitySynchronization2`.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Wait {
    pub kind: u32,
    pub wait_kind: u32,
    pub start: u64,
    pub end: u64,
    pub correlation: u32,
    pub context: u32,
    pub stream: u32,
    pub event: u32,
    pub event_wait: u64,
    pub status: u32,
    pub pad: u32,
}

/// `CUpti_ActivityAPI`: a call.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Call {
    pub kind: u32,
    pub function: u32,
    pub start: u64,
    pub end: u64,
    pub process: u32,
    pub thread: u32,
    pub correlation: u32,
    pub status: u32,
}

/// `CUpti_ActivityExternalCorrelation`: a call belongs to something that the profiler has numbered.
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct External {
    pub kind: u32,
    pub external_kind: u32,
    pub external: u64,
    pub correlation: u32,
    pub reserved: u32,
}

macro_rules! records {
    ($($kind:ident: $record:ident,)+) => {
        $(
            // SAFETY: a packed struct of numbers has no padding.
            unsafe impl Record for $record {}
        )+

        /// How long a record of this kind is.
        pub fn length(kind: u32) -> Option<usize> {
            match kind {
                $($kind => Some(size_of::<$record>()),)+
                _ => None,
            }
        }
    };
}

records! {
    MEMCPY: Copy6,
    MEMSET: Fill,
    RUNTIME: Call,
    CONCURRENT_KERNEL: Kernel,
    MEMCPY2: PeerCopy,
    SYNCHRONIZATION: Wait,
    EXTERNAL_CORRELATION: External,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The numbers are what GCC prints for cupti_activity.h of CUDA 13.0, CUPTI's version 130001.
    #[test]
    fn records_have_the_layout_of_cuda_13() {
        let kinds = [CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY2, SYNCHRONIZATION, RUNTIME, EXTERNAL_CORRELATION];
        assert_eq!(kinds.map(|kind| length(kind).unwrap()), [216, 96, 88, 96, 56, 40, 24]);
        let kernel = [
            offset_of!(Kernel, start),
            offset_of!(Kernel, device),
            offset_of!(Kernel, grid),
            offset_of!(Kernel, correlation),
            offset_of!(Kernel, grid_id),
            offset_of!(Kernel, name),
            offset_of!(Kernel, graph_node),
            offset_of!(Kernel, shared_limit),
            offset_of!(Kernel, graph),
            offset_of!(Kernel, access_policy),
            offset_of!(Kernel, local_memory_total),
            offset_of!(Kernel, is_device_launched),
        ];
        assert_eq!(kernel, [16, 40, 52, 92, 96, 104, 144, 152, 156, 160, 192, 208]);
        let copy = [
            offset_of!(Copy6, bytes),
            offset_of!(Copy6, device),
            offset_of!(Copy6, correlation),
            offset_of!(Copy6, graph),
            offset_of!(Copy6, copies),
        ];
        assert_eq!(copy, [8, 32, 44, 72, 88]);
        let peer = [offset_of!(PeerCopy, from), offset_of!(PeerCopy, correlation), offset_of!(PeerCopy, graph)];
        assert_eq!(peer, [44, 60, 80]);
        let fill = [
            offset_of!(Fill, bytes),
            offset_of!(Fill, correlation),
            offset_of!(Fill, memory_kind),
            offset_of!(Fill, graph),
        ];
        assert_eq!(fill, [8, 44, 50, 72]);
        let wait = [
            offset_of!(Wait, correlation),
            offset_of!(Wait, stream),
            offset_of!(Wait, event_wait),
            offset_of!(Wait, status),
        ];
        assert_eq!(wait, [24, 32, 40, 48]);
        assert_eq!([offset_of!(Call, start), offset_of!(Call, correlation)], [8, 32]);
        assert_eq!([offset_of!(External, external), offset_of!(External, correlation)], [8, 16]);
    }
}

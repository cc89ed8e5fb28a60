//! The parts of libtorch that tch leaves out, with a safe API.
//!
//! This is the only crate of the workspace with C++ or `unsafe`. Every entry point of its C++ side catches every
//! exception and returns a status; Rust turns the status into an [`Error`] whose kind says whether libtorch ran out of
//! memory, failed on the GPU, failed between ranks, or refused its arguments.
//!
//! ```
//! use overdrive_ffi::{Arg, Op, TensorList};
//! use tch::{Kind, Tensor};
//!
//! # fn main() -> Result<(), overdrive_ffi::Error> {
//! let xs = TensorList::new(&[Tensor::ones([2], (Kind::Float, tch::Device::Cpu))])?;
//! let mul = Op::find("aten::_foreach_mul_", "Scalar")?;
//! mul.call(&[Arg::TensorList(&xs), Arg::Double(3.0)])?;
//! assert_eq!(xs.get(0)?.double_value(&[1]), 3.0);
//! # Ok(())
//! # }
//! ```

pub mod adamw8bit;
pub mod allocations;
mod arrivals;
pub mod autocast;
pub mod autograd;
mod buffer_pool;
#[cfg(feature = "distributed")]
pub mod c10d;
mod callback;
mod callers;
#[cfg(feature = "distributed")]
pub mod compress;
pub mod context;
mod copy_ranges;
mod copy_stream;
pub mod cuda;
mod cuda_missing;
mod error;
mod grad_hook;
mod host_buffer;
mod host_cache;
pub mod host_memory;
#[cfg(feature = "libjpeg-turbo")]
pub mod jpeg;
pub mod keep;
mod kind;
mod leaves;
mod mapped_file;
mod memory;
mod on_demand;
mod op;
mod op_table;
mod package;
pub mod profiler;
mod raw;
mod raw_allocations;
mod raw_arrivals;
#[cfg(feature = "distributed")]
mod raw_c10d;
mod raw_keep;
mod raw_leaves;
mod raw_on_demand;
mod raw_profiler;
mod raw_record;
mod raw_saved_tensors;
mod raw_side_stream;
pub mod record;
pub mod rng;
mod rows;
pub mod saved_tensors;
mod side_stream;
mod sync_tensor;
mod tensor_list;
mod timed_event;
mod upload;

pub use arrivals::Arrivals;
pub use buffer_pool::BufferPool;
pub use copy_ranges::copy_ranges;
pub use copy_stream::{CopyEvent, CopyStream};
pub use error::{Error, ErrorKind, Trace};
pub use grad_hook::GradHook;
pub use host_buffer::{HostBuffer, Place};
pub use host_cache::{cache_host_memory, cached_host_memory};
pub use leaves::Leaves;
pub use mapped_file::MappedFile;
pub use memory::{Storage, empty_pinned, is_alone, storage, tensor_from_owner, tensor_from_vec};
pub use on_demand::{OnDemand, free_memory};
pub use op::{Arg, LazyOp, Op, Value};
pub use package::{
    Form, LEAST_SIZE, Package, bump_version, check_owner, data_address, is_lazy, memory_address, share_memory,
};
pub use rows::Rows;
pub use side_stream::{SideStream, Transfer};
pub use sync_tensor::SyncTensor;
pub use tensor_list::{Grads, TensorId, TensorList, set_grad, take_grad};
pub use timed_event::TimedEvent;
pub use upload::{DeviceConstants, upload};

#[doc(hidden)]
pub use error::test_throw;
#[doc(hidden)]
pub use op::test_find;

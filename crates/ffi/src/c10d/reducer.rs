//! The reducer: averages gradients over ranks while backward runs.

use std::ffi::{CStr, c_char, c_void};
use std::panic::resume_unwind;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::bucket_hook::{BucketHook, Failure, Shared, on_drop, on_finish, on_start};
use super::c_string;
use super::collective::Work;
use super::group::ProcessGroup;
use crate::error::{Error, check};
use crate::kind::to_scalar_type;
use crate::raw_c10d as raw;
use crate::tensor_list::TensorList;

/// Options of a [`Reducer`].
#[derive(Clone, Copy, Debug)]
pub struct ReducerOptions<'a> {
    /// The largest size of a bucket in bytes; `None` for PyTorch's 25 MiB, with a first bucket of 1 MiB.
    pub bucket_bytes: Option<usize>,
    /// Sizes of the buckets in bytes, in the order in which they become ready; the last one repeats. Empty:
    /// `bucket_bytes` for all.
    pub bucket_list: &'a [i64],
    /// Do not reduce unused parameters, which have to be the same on all ranks.
    pub skip_unused: bool,
    /// Search the graph before each backward for parameters that it does not reach.
    pub find_unused_parameters: bool,
    /// Make the gradients views of the buckets, which saves a copy.
    pub gradient_as_bucket_view: bool,
    /// Every backward reaches the same parameters equally often.
    pub static_graph: bool,
    /// Whether the owner broadcasts buffers; only for the log.
    pub broadcast_buffers: bool,
    /// The dtype in which passes compute, and their gradients and buckets are; `None`: the parameters'. The parameters
    /// have it from [`Reducer::lower`] to the end of backward.
    pub low: Option<Kind>,
    /// Parameters without gradients, which passes use in that dtype too.
    pub frozen: Option<&'a TensorList>,
}

/// How the parameters are divided into buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketLayout {
    /// The numbers of each bucket's parameters, in the order in which they lie in it; buckets in the order in which they
    /// are reduced.
    pub buckets: Vec<Vec<usize>>,
    /// Whether it stays; otherwise it is rebuilt once, in the order of the first pass's gradients.
    pub is_final: bool,
}

impl BucketLayout {
    /// From all buckets' numbers, one bucket after the other, and the buckets' lengths, which add up to as many.
    pub fn new(numbers: &[usize], lengths: &[usize], is_final: bool) -> Self {
        let mut rest = numbers;
        let bucket = |length: &usize| {
            let (bucket, behind) = rest.split_at(*length);
            rest = behind;
            bucket.to_vec()
        };
        Self { buckets: lengths.iter().map(bucket).collect(), is_final }
    }
}

/// Averages gradients over ranks while backward runs.
///
/// It hooks into the parameters' gradients until it is dropped.
///
/// # Source
/// `c10d::Reducer`
#[derive(Debug)]
pub struct Reducer {
    handle: NonNull<raw::Reducer>,
    hook: Option<Arc<Shared>>,
    /// How many parameters it has.
    count: usize,
}

// SAFETY: the reducer locks around its state, and libtorch itself calls it from several threads.
unsafe impl Send for Reducer {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BucketHook")
    }
}

impl Reducer {
    /// A reducer of the parameters' gradients; the names are for messages. Those for which `is_sparse` is true have sparse
    /// gradients, which Gloo averages.
    ///
    /// # Errors
    /// When there are no parameters, or one does not require a gradient.
    pub fn new(
        group: &ProcessGroup,
        params: &[(String, Tensor)],
        is_sparse: impl Fn(&str) -> bool,
        options: &ReducerOptions<'_>,
    ) -> Result<Self, Error> {
        const MIB: usize = 1 << 20;
        let list = TensorList::new(&params.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())?;
        let texts = params.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>, _>>()?;
        let names: Vec<*const c_char> = texts.iter().map(|name| name.as_ptr()).collect();
        let sparse: Vec<u8> = params.iter().map(|(name, _)| u8::from(is_sparse(name))).collect();
        let bytes = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        let wanted = raw::ReducerOptions {
            bucket_bytes: bytes(options.bucket_bytes.unwrap_or(25 * MIB)),
            first_bucket_bytes: bytes(MIB),
            default_buckets: i32::from(options.bucket_bytes.is_none()),
            bucket_list: options.bucket_list.as_ptr(),
            bucket_list_length: options.bucket_list.len(),
            skip_unused: i32::from(options.skip_unused),
            find_unused_parameters: i32::from(options.find_unused_parameters),
            gradient_as_bucket_view: i32::from(options.gradient_as_bucket_view),
            static_graph: i32::from(options.static_graph),
            broadcast_buffers: i32::from(options.broadcast_buffers),
            low_dtype: options.low.map_or(-1, to_scalar_type),
            frozen: options.frozen.map_or(ptr::null(), TensorList::as_ptr),
        };
        let mut out = ptr::null_mut();
        // SAFETY: the list, its names and what is sparse, as many, and the options' list outlive the call.
        check(|err| unsafe {
            let (list, names, sparse) = (list.as_ptr(), names.as_ptr(), sparse.as_ptr());
            raw::od_reducer_new(group.as_ptr(), list, names, sparse, &wanted, &mut out, err)
        })?;
        let handle = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no reducer"))?;
        Ok(Self { handle, hook: None, count: params.len() })
    }

    /// Call it before each forward pass. Takes times if the backward is `synchronised`, and rebuilds the buckets once
    /// the order of the gradients is known. Returns whether it has rebuilt them.
    ///
    /// # Errors
    /// When a member has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// When buckets are rebuilt, waits for all members; after [`set_log_rate`](Self::set_log_rate) on a GPU, for the
    /// device in the measured steps.
    pub fn before_forward(&self, synchronised: bool) -> Result<bool, Error> {
        let mut rebuilt = 0;
        // SAFETY: the handle is live.
        check(|err| unsafe {
            raw::od_reducer_before_forward(self.as_ptr(), i32::from(synchronised), &mut rebuilt, err)
        })?;
        Ok(rebuilt != 0)
    }

    /// Begins a pass in the lower precision of [`low`](ReducerOptions::low): the parameters' data are copies in it, and
    /// their gradients are set aside, until backward ends or [`raise`](Self::raise) is called. Then the parameters have
    /// their own data again, which is as it was. Returns whether it has begun one: not where one has begun before.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn lower(&self) -> Result<bool, Error> {
        let mut lowered = 0;
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_lower(self.as_ptr(), &mut lowered, err) })?;
        Ok(lowered != 0)
    }

    /// Ends a pass that [`lower`](Self::lower) has begun, if one has not ended.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn raise(&self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_raise(self.as_ptr(), err) })
    }

    /// Makes the next backward average the gradients. `outputs` are the tensors that it starts from; they are used only
    /// with [`find_unused_parameters`](ReducerOptions::find_unused_parameters).
    ///
    /// # Errors
    /// When the last backward has not reached all parameters.
    pub fn arm(&self, outputs: &TensorList) -> Result<(), Error> {
        // SAFETY: both handles are live.
        check(|err| unsafe { raw::od_reducer_arm(self.as_ptr(), outputs.as_ptr(), err) })
    }

    /// Makes the next backward leave the gradients local.
    ///
    /// # Errors
    /// None are known.
    pub fn disarm(&self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_disarm(self.as_ptr(), err) })
    }

    /// Averages the accumulated gradients without a backward pass on this rank, while the other members run theirs.
    ///
    /// # Errors
    /// When the last backward has not reached all parameters, or a member has exited or does not take part within the
    /// group's timeout.
    ///
    /// # Syncs
    /// Over Gloo, waits for all members.
    pub fn close_with_nothing(&self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_close_with_nothing(self.as_ptr(), err) })
    }

    /// Whether a backward pass is under way on this thread, or the communication hook on any. All other methods return
    /// an error then, because the reducer may be locked.
    pub fn is_within_backward(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { raw::od_reducer_within_backward(self.as_ptr()) != 0 }
    }

    /// The outputs, with a node in the graph that notices when backward begins, where the reducer needs that; otherwise
    /// the same outputs.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sink(&self, outputs: &TensorList) -> Result<TensorList, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: both handles are live.
        check(|err| unsafe { raw::od_reducer_sink(self.as_ptr(), outputs.as_ptr(), &mut out, err) })?;
        // SAFETY: on success `out` is a list that we own.
        unsafe { TensorList::from_raw(out) }
    }

    /// How the parameters are divided into buckets now.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn layout(&self) -> Result<BucketLayout, Error> {
        let (mut numbers, mut lengths) = (vec![0; self.count], vec![0; self.count]);
        let (mut buckets, mut is_final) = (0, 0);
        // SAFETY: the handle is live, and no layout has more buckets than parameters.
        check(|err| unsafe {
            let (numbers, lengths) = (numbers.as_mut_ptr(), lengths.as_mut_ptr());
            raw::od_reducer_layout(self.as_ptr(), numbers, lengths, &mut buckets, &mut is_final, err)
        })?;
        Ok(BucketLayout::new(&numbers, &lengths[..buckets], is_final != 0))
    }

    /// Divides the parameters into these buckets. All members call it before the same pass.
    ///
    /// # Errors
    /// When a parameter is missing or there twice, a bucket is empty or mixes dtypes, devices or sparse gradients, or the
    /// last pass is not complete; nothing has changed then.
    pub fn lay_out(&self, layout: &BucketLayout) -> Result<(), Error> {
        let numbers = layout.buckets.concat();
        let lengths: Vec<usize> = layout.buckets.iter().map(Vec::len).collect();
        let is_final = i32::from(layout.is_final);
        // SAFETY: the handle is live, and the lengths add up to the numbers.
        check(|err| unsafe {
            let (numbers, count) = (numbers.as_ptr(), lengths.len());
            raw::od_reducer_lay_out(self.as_ptr(), numbers, lengths.as_ptr(), count, is_final, err)
        })
    }

    /// Sends gradients as float16.
    ///
    /// # Errors
    /// When there is a hook already.
    ///
    /// # Source
    /// `BuiltinCommHookType.FP16_COMPRESS`
    pub fn compress_to_half(&mut self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_fp16_hook(self.as_ptr(), err) })
    }

    /// Calls `hook` instead of the all-reduce.
    ///
    /// # Errors
    /// When there is a hook already.
    ///
    /// # Source
    /// `register_comm_hook`
    pub fn set_hook(&mut self, hook: Box<dyn BucketHook>) -> Result<(), Error> {
        let shared = Shared::new(hook);
        let owner = Arc::into_raw(shared.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the handle is live. `owner` is a counted reference that the C++ side passes to `on_drop` once, on
        // success and on failure, and to the other callbacks only before that.
        check(|err| unsafe {
            raw::od_reducer_set_hook(self.handle.as_ptr(), owner, on_start, on_finish, on_drop, err)
        })?;
        self.hook = Some(shared);
        Ok(())
    }

    /// The hook's error since the last call, if there was one. Resumes a hook's panic, which could not unwind through
    /// libtorch.
    pub fn hook_failure(&self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        match self.hook.as_ref()?.take_failure()? {
            Failure::Error(error) => Some(error),
            Failure::Panic(panic) => resume_unwind(panic),
        }
    }

    /// The message of the hook's first failure, on every call. After it libtorch's reducer is stuck in the middle of a
    /// pass, and unusable.
    pub fn first_hook_failure(&self) -> Option<&str> {
        self.hook.as_ref()?.first_failure()
    }

    /// Takes part in the other members' backward pass with gradients of zero.
    ///
    /// # Errors
    /// When a member has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all members.
    pub fn shadow_backward(&mut self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_reducer_shadow(self.handle.as_ptr(), err) })
    }

    /// Divides the next backward's gradients by the result of the sum `active_ranks`, or by the world size although
    /// some ranks have nothing to add.
    ///
    /// # Errors
    /// None are known.
    pub fn divide_by(&self, active_ranks: &Work, by_world_size: bool) -> Result<(), Error> {
        // SAFETY: both handles are live.
        check(|err| unsafe {
            raw::od_reducer_divide_by(self.as_ptr(), active_ranks.as_ptr(), i32::from(by_world_size), err)
        })
    }

    /// Takes times every `steps` steps, besides the first ten; 100 by default. On a GPU no times are taken before this
    /// call.
    ///
    /// # Errors
    /// When `steps` is 0, or beyond `i32`.
    ///
    /// # Syncs
    /// On a GPU, [`before_forward`](Self::before_forward) of the next measured steps waits for the device.
    ///
    /// # Source
    /// `_set_ddp_runtime_logging_sample_rate`
    pub fn set_log_rate(&mut self, steps: u32) -> Result<(), Error> {
        // libtorch divides by it without a check.
        let steps = i32::try_from(steps).ok().filter(|steps| *steps > 0);
        let steps = steps.ok_or_else(|| Error::refused("the logging sample rate should be 1 to 2147483647 steps"))?;
        // SAFETY: the reducer is live.
        check(|err| unsafe { raw::od_reducer_set_log_rate(self.handle.as_ptr(), steps, err) })
    }

    /// What libtorch logs about the run, as names and values: buckets, times, settings.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Source
    /// `_get_ddp_logging_data`
    pub fn log(&self) -> Result<Vec<(String, String)>, Error> {
        let mut lines = Vec::new();
        let visitor = ptr::from_mut(&mut lines).cast();
        // SAFETY: the visitor is the vector above, which `receive_line` expects.
        check(|err| unsafe { raw::od_reducer_log(self.as_ptr(), visitor, receive_line, err) })?;
        Ok(lines)
    }

    fn as_ptr(&self) -> *const raw::Reducer {
        self.handle.as_ptr()
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { raw::od_reducer_free(self.handle.as_ptr()) }
    }
}

/// Runs backward from a loss; failures between ranks are reported with their kind.
///
/// # Errors
/// Those of backward.
pub fn backward(loss: &Tensor) -> Result<(), Error> {
    // SAFETY: the tensor is live.
    check(|err| unsafe { raw::od_reducer_backward(loss.as_ptr(), err) })
}

extern "C" fn receive_line(visitor: *mut c_void, key: *const c_char, value: *const c_char) {
    // SAFETY: `log` passes its own vector, which lives through the call.
    let lines = unsafe { &mut *visitor.cast::<Vec<(String, String)>>() };
    // SAFETY: both are NUL-terminated and live through this call.
    let (key, value) = unsafe { (CStr::from_ptr(key), CStr::from_ptr(value)) };
    lines.push((key.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
}

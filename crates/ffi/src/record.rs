//! Records a training step as a list of libtorch operators, for `overdrive_compile`, which compiles the list.

use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tch::Tensor;

use crate::callers::caller_in;
use crate::error::{Error, check, take_text};
use crate::raw_record as raw;
use crate::tensor_list::TensorList;

/// Records the operators that this thread runs, below autograd and autocast: those of the forward pass, of the backward
/// pass and of updates in place. They also run as usual, so that a step takes effect even if it cannot be recorded.
///
/// Each tensor has a number. One that no recorded operator has made is external, an input of the step; the recording
/// keeps it alive. Recording ends when this is dropped, also in a panic. A recording is bound to its thread, and only
/// one thread of a process can record at a time.
#[derive(Debug)]
pub struct Recording {
    recorder: NonNull<raw::Recorder>,
    notes: Arc<Mutex<Notes>>,
    _not_send: PhantomData<*const ()>,
}

/// What the C++ side reports while it records.
#[derive(Debug, Default)]
struct Notes {
    /// The backtrace of each operator. Its symbols are resolved only for an error's message.
    callers: Vec<Backtrace>,
    /// Each reason once, with the first operator.
    refusals: Vec<Refusal>,
    /// Whether the step's operators are all there.
    is_ended: bool,
}

/// Why a step cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What cannot be recorded, with the operator.
    pub reason: String,
    /// The recorded operator that it is about; `None` if it is about the step as a whole.
    pub operator: Option<usize>,
    /// The line that called what is refused, where it is no operator.
    pub caller: Option<String>,
}

thread_local! {
    /// Of the step that this thread records, or has recorded.
    static NOTES: RefCell<Weak<Mutex<Notes>>> = const { RefCell::new(Weak::new()) };
}

/// For what does more than its operators, and so would do nothing in compiled code: if this thread records a step, the
/// step is not compiled, for this reason.
pub fn refuse(reason: &str) {
    let Some(notes) = NOTES.with_borrow(Weak::upgrade) else { return };
    let mut notes = lock(&notes);
    if notes.is_ended || notes.refusals.iter().any(|refusal| refusal.reason == reason) {
        return;
    }
    let caller = caller_in(&Backtrace::force_capture().to_string()).map(|it| it.to_string());
    notes.refusals.push(Refusal { reason: reason.to_owned(), operator: None, caller });
}

/// A recorded step.
#[derive(Debug)]
pub struct Record {
    /// The operators in order, as a JSON list. Each has `op`, `overload`, `args` in the order of its schema, and `out`,
    /// the numbers of its results. An argument for which JSON has no type is an object with one key: `{"tensor": n}`,
    /// or `dtype`, `layout`, `memory_format`, `device`, or `float` for infinities and NaN.
    pub operators: String,
    /// The external tensors with their numbers, in the order of their first use.
    pub externals: Vec<(i64, Tensor)>,
    /// Which of them the step writes to.
    pub written: Vec<bool>,
    /// Which of them the step writes to by an operator that increments `Tensor._version`, which tells autograd. Batch
    /// normalization updates its statistics without that.
    pub noticed: Vec<bool>,
    /// The numbers of the tensors that [`Recording::finish`] was given.
    pub results: Vec<i64>,
    /// Why it cannot be compiled, each reason once; empty if it can.
    pub refusals: Vec<Refusal>,
    callers: Vec<Backtrace>,
}

impl Recording {
    /// Starts to record; `None` if another thread of the process is recording.
    ///
    /// Clears autocast's cache of cast weights first. Casts from an earlier step would be external, and so stay as they
    /// are when the weights change.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn start() -> Result<Option<Self>, Error> {
        let notes = Arc::new(Mutex::new(Notes::default()));
        let owner = Arc::into_raw(notes.clone()).cast_mut().cast::<c_void>();
        let mut out = ptr::null_mut();
        // SAFETY: `owner` is a counted reference that the C++ side gives to `on_drop` once, on success and on failure.
        check(|err| unsafe { raw::od_record_start(owner, on_operator, on_refusal, on_drop, &mut out, err) })?;
        let Some(recorder) = NonNull::new(out) else { return Ok(None) };
        NOTES.set(Arc::downgrade(&notes));
        Ok(Some(Self { recorder, notes, _not_send: PhantomData }))
    }

    /// The number of a tensor. One that no recorded operator has made becomes external.
    ///
    /// # Errors
    /// When the tensor is undefined.
    pub fn number(&self, tensor: &Tensor) -> Result<i64, Error> {
        let mut number = 0;
        // SAFETY: recorder and tensor are live.
        check(|err| unsafe { raw::od_record_number(self.recorder.as_ptr(), tensor.as_ptr(), &mut number, err) })?;
        Ok(number)
    }

    /// Makes a tensor an external one with a number of its own, even if another one has the same memory.
    ///
    /// # Errors
    /// When the tensor is undefined.
    pub fn add_input(&self, tensor: &Tensor) -> Result<(), Error> {
        // SAFETY: recorder and tensor are live.
        check(|err| unsafe { raw::od_record_add_input(self.recorder.as_ptr(), tensor.as_ptr(), err) })
    }

    /// How many operators have been recorded so far.
    pub fn operators(&self) -> usize {
        lock(&self.notes).callers.len()
    }

    /// The external tensors so far.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn externals(&self) -> Result<Vec<Tensor>, Error> {
        // SAFETY: the recorder is live.
        TensorList::receive(|out, err| unsafe { raw::od_record_externals(self.recorder.as_ptr(), out, err) })?.to_vec()
    }

    /// Whether the step writes to a tensor, and whether that increments its version.
    fn writes_to(&self, tensor: &Tensor) -> Result<(bool, bool), Error> {
        let mut written = 0;
        // SAFETY: recorder and tensor are live.
        check(|err| unsafe { raw::od_record_writes_to(self.recorder.as_ptr(), tensor.as_ptr(), &mut written, err) })?;
        Ok((written & raw::WRITTEN != 0, written & raw::NOTICED != 0))
    }

    /// Ends recording. `results` are the tensors that the step returns.
    ///
    /// # Errors
    /// When a result is undefined, or memory runs out.
    pub fn finish(self, results: &[Tensor]) -> Result<Record, Error> {
        // SAFETY: the recorder is live, and was started on this thread.
        unsafe { raw::od_record_stop(self.recorder.as_ptr()) };
        lock(&self.notes).is_ended = true;
        let results = results.iter().map(|result| self.number(result)).collect::<Result<Vec<_>, _>>()?;
        let of_operators = lock(&self.notes).refusals.len();
        let mut text = ptr::null_mut();
        // SAFETY: the recorder is live.
        check(|err| unsafe { raw::od_record_operators(self.recorder.as_ptr(), &mut text, err) })?;
        // SAFETY: the call has made a string that is ours.
        let operators = format!("[{}]", unsafe { take_text(text) });
        // Refusals after the last operator are about the step as a whole.
        lock(&self.notes).refusals.iter_mut().skip(of_operators).for_each(|refusal| refusal.operator = None);
        let externals = self.externals()?;
        let writes = externals.iter().map(|tensor| self.writes_to(tensor)).collect::<Result<Vec<_>, _>>()?;
        let (written, noticed) = writes.into_iter().unzip();
        let externals =
            externals.into_iter().map(|tensor| Ok((self.number(&tensor)?, tensor))).collect::<Result<_, Error>>()?;
        let notes = std::mem::take(&mut *lock(&self.notes));
        let Notes { callers, refusals, .. } = notes;
        Ok(Record { operators, externals, written, noticed, results, refusals, callers })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: the recorder is live and never used again. This is its thread, as a recording is not `Send`.
        unsafe { raw::od_record_free(self.recorder.as_ptr()) }
    }
}

impl Record {
    /// Frees the operators' backtraces. [`caller`](Self::caller) returns `None` from then on.
    pub fn forget_callers(&mut self) {
        self.callers = Vec::new();
    }

    /// The line or function that called an operator: the innermost one that belongs neither to libtorch, tch, the
    /// standard library nor a crate of Overdrive. For an operator of the backward pass, this is the
    /// one that called `backward`.
    ///
    /// Lines need a program with debug information.
    pub fn caller(&self, operator: usize) -> Option<String> {
        Some(caller_in(&self.callers.get(operator)?.to_string())?.to_string())
    }
}

fn lock(notes: &Mutex<Notes>) -> MutexGuard<'_, Notes> {
    notes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `owner` is the pointer from `Arc::into_raw` in `start`, and `on_drop` has not been called with it.
unsafe fn notes_of<'a>(owner: *mut c_void) -> &'a Mutex<Notes> {
    // SAFETY: as above.
    unsafe { &*owner.cast::<Mutex<Notes>>() }
}

extern "C" fn on_operator(owner: *mut c_void) {
    let caller = Backtrace::force_capture();
    // SAFETY: called while the recorder is live.
    lock(unsafe { notes_of(owner) }).callers.push(caller);
}

extern "C" fn on_refusal(owner: *mut c_void, reason: *const c_char) {
    // SAFETY: as above; the C++ side gives a NUL-terminated string that lives through the call.
    let (notes, reason) = unsafe { (notes_of(owner), CStr::from_ptr(reason).to_string_lossy().into_owned()) };
    let mut notes = lock(notes);
    let operator = notes.callers.len().checked_sub(1);
    if !notes.refusals.iter().any(|refusal| refusal.reason == reason) {
        notes.refusals.push(Refusal { reason, operator, caller: None });
    }
}

extern "C" fn on_drop(owner: *mut c_void) {
    // SAFETY: the reference that `Arc::into_raw` made, given here once.
    drop(unsafe { Arc::from_raw(owner.cast::<Mutex<Notes>>()) });
}

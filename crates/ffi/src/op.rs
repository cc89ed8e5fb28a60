//! Operators of libtorch, called by name through the boxed dispatcher.

use std::ffi::CString;
use std::ptr;
use std::sync::OnceLock;

use tch::Tensor;

use crate::error::{Error, check};
use crate::op_table::{Checks, checks};
use crate::raw;
use crate::tensor_list::TensorList;

/// The most values that an operator may return; libtorch's operators return at most ten.
const MAX_RESULTS: usize = 16;

/// One argument of an operator.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// No value, for an optional argument.
    None,
    /// A `bool`.
    Bool(bool),
    /// An `int`, a `ScalarType` or a whole `Scalar`.
    Int(i64),
    /// A `float` or a real `Scalar`.
    Double(f64),
    /// A `Tensor`.
    Tensor(&'a Tensor),
    /// A `Tensor[]`.
    TensorList(&'a TensorList),
    /// An `int[]`.
    IntList(&'a [i64]),
    /// A `Scalar[]` of real numbers.
    ScalarList(&'a [f64]),
}

impl<'a> From<Option<&'a Tensor>> for Arg<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Arg::None, Arg::Tensor)
    }
}

/// One value that an operator returns.
#[derive(Debug)]
pub enum Value {
    /// No value.
    None,
    /// A `bool`.
    Bool(bool),
    /// An `int`.
    Int(i64),
    /// A `float`.
    Double(f64),
    /// A `Tensor`.
    Tensor(Tensor),
    /// A `Tensor[]`.
    TensorList(TensorList),
}

/// An operator of libtorch, found by name (`"aten::_fused_adamw_"`) and overload (`""`, `"Scalar"`, ..).
///
/// libtorch does not check the arguments of every operator: some read past the end of a short list.
/// [`find`](Self::find) only finds operators whose wrong arguments are refused, by the operator itself or by this
/// crate.
#[derive(Clone, Copy)]
pub struct Op {
    handle: &'static raw::Op,
    checks: Checks,
}

// SAFETY: an operator handle refers to the dispatcher's entry, which may be used concurrently and is never freed.
unsafe impl Send for Op {}
// SAFETY: as above.
unsafe impl Sync for Op {}

impl Op {
    /// Looks an operator up. Keep the result ([`LazyOp`] does): the look-up takes a lock and a hash.
    ///
    /// # Errors
    /// When the operator is not among those that are safe with any arguments, or libtorch has none of this name and
    /// overload.
    pub fn find(name: &str, overload: &str) -> Result<Self, Error> {
        let Some(checks) = checks(name, overload) else {
            return Err(Error::refused(format!(
                "the operator {name:?} with the overload {overload:?} is not among those whose arguments are checked: \
                 find out what it does with wrong arguments and add it to the table in overdrive-ffi's op_table.rs, or \
                 use `find_unchecked`"
            )));
        };
        Ok(Self { checks, ..look_up(name, overload)? })
    }

    /// Looks up any operator.
    ///
    /// # Errors
    /// When libtorch has no operator of this name and overload.
    ///
    /// # Safety
    /// The arguments of every [`call`](Self::call) have to be valid for the operator: not all operators check the
    /// lengths of lists, the sizes, dtypes and devices of tensors, and the ranges of numbers.
    pub unsafe fn find_unchecked(name: &str, overload: &str) -> Result<Self, Error> {
        look_up(name, overload)
    }

    /// Calls it. Arguments left out at the end take their defaults.
    ///
    /// # Errors
    /// When an argument has the wrong type or a required one is missing, and errors of the operator itself.
    pub fn call(&self, args: &[Arg<'_>]) -> Result<Vec<Value>, Error> {
        let args: Vec<raw::Value> = args.iter().map(to_raw).collect();
        let mut results = [raw::Value { tag: raw::NONE, integer: 0, real: 0.0, pointer: ptr::null() }; MAX_RESULTS];
        let mut count = 0;
        // SAFETY: every pointer in `args` is borrowed for the length of the call, and `results` has the stated length.
        // Invalid arguments are refused, or the caller of `find_unchecked` has promised that they are valid.
        check(|err| unsafe {
            let fused = i32::from(self.checks == Checks::Fused);
            let (handle, out) = (self.handle, results.as_mut_ptr());
            raw::od_op_call(handle, fused, args.as_ptr(), args.len(), out, MAX_RESULTS, &mut count, err)
        })?;
        // SAFETY: the first `count` values were written by a call that succeeded, each owned by us and read once.
        results[..count].iter().map(|value| unsafe { from_raw(value) }).collect()
    }
}

/// Looks up an operator in libtorch, without this crate's checks.
fn look_up(name: &str, overload: &str) -> Result<Op, Error> {
    let c_string = |text| CString::new(text).map_err(|_| Error::refused(format!("{text:?} holds a zero byte")));
    let (name, overload) = (c_string(name)?, c_string(overload)?);
    let mut out = ptr::null();
    // SAFETY: both strings outlive the call.
    check(|err| unsafe { raw::od_op_find(name.as_ptr(), overload.as_ptr(), &mut out, err) })?;
    // SAFETY: on success the C++ side has made a handle that is never freed.
    let handle = unsafe { out.as_ref() }.ok_or_else(|| Error::refused("libtorch returned no operator"))?;
    Ok(Op { handle, checks: Checks::Own })
}

/// [`Op::find_unchecked`] for tests that take operators and arguments from PyTorch's tests.
#[doc(hidden)]
pub fn test_find(name: &str, overload: &str) -> Result<Op, Error> {
    look_up(name, overload)
}

fn to_raw(arg: &Arg<'_>) -> raw::Value {
    let mut value = raw::Value { tag: raw::NONE, integer: 0, real: 0.0, pointer: ptr::null() };
    match *arg {
        Arg::None => {}
        Arg::Bool(flag) => (value.tag, value.integer) = (raw::BOOL, i64::from(flag)),
        Arg::Int(integer) => (value.tag, value.integer) = (raw::INT, integer),
        Arg::Double(real) => (value.tag, value.real) = (raw::DOUBLE, real),
        Arg::Tensor(tensor) => (value.tag, value.pointer) = (raw::TENSOR, tensor.as_ptr().cast()),
        Arg::TensorList(list) => (value.tag, value.pointer) = (raw::TENSOR_LIST, list.as_ptr().cast()),
        Arg::IntList(list) => {
            (value.tag, value.pointer) = (raw::INT_LIST, list.as_ptr().cast());
            value.integer = list.len() as i64;
        }
        Arg::ScalarList(list) => {
            (value.tag, value.pointer) = (raw::SCALAR_LIST, list.as_ptr().cast());
            value.integer = list.len() as i64;
        }
    }
    value
}

/// # Safety
/// `value` was written by `od_op_call`, and what it points to is ours and read only once.
unsafe fn from_raw(value: &raw::Value) -> Result<Value, Error> {
    Ok(match value.tag {
        raw::NONE => Value::None,
        raw::BOOL => Value::Bool(value.integer != 0),
        raw::INT => Value::Int(value.integer),
        raw::DOUBLE => Value::Double(value.real),
        // SAFETY: a tensor that the C++ side has allocated for us.
        raw::TENSOR => Value::Tensor(unsafe { Tensor::from_ptr(value.pointer.cast_mut().cast()) }),
        // SAFETY: a list that the C++ side has allocated for us.
        raw::TENSOR_LIST => Value::TensorList(unsafe { TensorList::from_raw(value.pointer.cast_mut().cast()) }?),
        tag => return Err(Error::refused(format!("unknown result tag {tag}"))),
    })
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Op")
    }
}

/// An [`Op`] that is looked up at its first call; made for a `static`.
pub struct LazyOp {
    name: &'static str,
    overload: &'static str,
    found: OnceLock<Op>,
}

impl LazyOp {
    /// An operator by name and overload, not looked up yet.
    pub const fn new(name: &'static str, overload: &'static str) -> Self {
        Self { name, overload, found: OnceLock::new() }
    }

    /// Calls it and returns its first result, a tensor.
    ///
    /// Use it for operators that take a `Scalar`: tch's fallible forms of those panic when libtorch refuses, because
    /// dropping their scalar reads the pending error first.
    ///
    /// # Errors
    /// Those of [`call`](Self::call), and when the operator returns no tensor.
    pub fn tensor(&self, args: &[Arg<'_>]) -> Result<Tensor, Error> {
        match self.call(args)?.into_iter().next() {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            other => Err(Error::refused(format!("{} returned {other:?}, not a tensor", self.name))),
        }
    }

    /// Calls it; see [`Op::call`].
    ///
    /// # Errors
    /// Those of [`Op::find`] and [`Op::call`].
    pub fn call(&self, args: &[Arg<'_>]) -> Result<Vec<Value>, Error> {
        let op = match self.found.get() {
            Some(op) => op,
            None => {
                let op = Op::find(self.name, self.overload)?;
                self.found.get_or_init(|| op)
            }
        };
        op.call(args)
    }
}

//! Checks whether a collective can take a tensor, before libtorch is called.

use overdrive_ffi::c10d::{Backend, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::error::DdpError;
use crate::group::ProcessGroup;

fn refused(op: &'static str, argument: &str, found: impl Into<String>, expected: impl Into<String>) -> DdpError {
    DdpError::InvalidTensor { op, argument: argument.to_owned(), found: found.into(), expected: expected.into() }
}

/// Checks that a tensor is dense, contiguous, on a device of the group's backend, and of a dtype that backends send.
pub(crate) fn tensor(group: &ProcessGroup, op: &'static str, argument: &str, tensor: &Tensor) -> Result<(), DdpError> {
    sendable(group, op, argument, tensor)?;
    if !tensor.is_contiguous() {
        let found = format!("not contiguous: strides {:?} for shape {:?}", tensor.stride(), tensor.size());
        return Err(refused(op, argument, found, "contiguous: call contiguous()"));
    }
    Ok(())
}

/// As [`tensor`], for a tensor of which a contiguous copy is sent.
fn sendable(group: &ProcessGroup, op: &'static str, argument: &str, tensor: &Tensor) -> Result<(), DdpError> {
    if !tensor.defined() {
        return Err(refused(op, argument, "undefined", "a tensor"));
    }
    let device = tensor.device();
    let (fits, expected) = match (group.backend(), device) {
        (Backend::Nccl, device) => (matches!(device, Device::Cuda(_)), "on a GPU, because the group uses NCCL"),
        (_, device) => (matches!(device, Device::Cpu | Device::Cuda(_)), "on the host or a CUDA device"),
    };
    if !fits {
        return Err(refused(op, argument, format!("on {device:?}"), expected));
    }
    let kind = tensor.kind();
    if !is_sent(kind) {
        let expected =
            "float16, bfloat16, float32, float64, int8, uint8, int32, int64 or bool; view complex numbers as real";
        return Err(refused(op, argument, format!("of dtype {kind:?}"), expected));
    }
    if let Some(layout) = other_layout(tensor) {
        return Err(refused(op, argument, layout, "dense: send its indices and values, or call to_dense"));
    }
    Ok(())
}

/// The name of a tensor's layout if it is not strided; `None` for a dense tensor. tch panics when it is asked for the
/// strides of other layouts.
pub(crate) fn other_layout(tensor: &Tensor) -> Option<&'static str> {
    if tensor.is_sparse() {
        Some("sparse")
    } else if tensor.is_mkldnn() {
        Some("of oneDNN's layout")
    } else if matches!(tensor.kind(), Kind::QInt8 | Kind::QUInt8 | Kind::QInt32) {
        Some("quantised")
    } else {
        // tch knows no other layouts, but libtorch compares storages and strides only where there are any.
        tensor.f_is_set_to(tensor).is_err().then_some("compressed sparse")
    }
}

/// Checks that a model's parameter or buffer can be broadcast; the error is the reason why not.
pub(crate) fn in_model(tensor: &Tensor) -> Result<(), String> {
    if !tensor.defined() {
        return Err("is undefined, but should be a tensor".to_owned());
    }
    if let Some(layout) = other_layout(tensor) {
        return Err(format!("is {layout}, but should be dense"));
    }
    match tensor.kind() {
        Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble => Ok(()),
        kind if is_sent(kind) => Ok(()),
        kind => Err(format!("is of dtype {kind:?}, which no backend sends")),
    }
}

fn is_sent(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Half
            | Kind::BFloat16
            | Kind::Float
            | Kind::Double
            | Kind::Int8
            | Kind::Uint8
            | Kind::Int
            | Kind::Int64
            | Kind::Bool
    )
}

/// Whether tensors have to match in shape too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shapes {
    Any,
    Same,
}

/// Checks each tensor of a list, and that all match `like`, as [`same`] does.
pub(crate) fn list(
    group: &ProcessGroup,
    op: &'static str,
    argument: &str,
    tensors: &[Tensor],
    like: (&str, &Tensor),
    shapes: Shapes,
) -> Result<(), DdpError> {
    for (index, one) in tensors.iter().enumerate() {
        let argument = format!("{argument}[{index}]");
        tensor(group, op, &argument, one)?;
        same(op, &argument, one, like, shapes)?;
    }
    Ok(())
}

/// The length that all tensors have in their first dimension. They need not be contiguous.
pub(crate) fn one_batch(group: &ProcessGroup, op: &'static str, tensors: &[&Tensor]) -> Result<i64, DdpError> {
    let expected = "of shape [batch, ..], with the same batch for all tensors";
    let mut batch = None;
    for (index, one) in tensors.iter().enumerate() {
        let argument = format!("tensors[{index}]");
        sendable(group, op, &argument, one)?;
        match (one.size().first(), batch) {
            (Some(&first), None) => batch = Some(first),
            (Some(first), Some(others)) if *first == others => {}
            _ => return Err(refused(op, &argument, describe(one), expected)),
        }
    }
    batch.ok_or_else(|| refused(op, "tensors", "empty", "at least one tensor"))
}

/// The first tensor of a list; an error if the list is empty.
pub(crate) fn first<'a>(op: &'static str, argument: &str, tensors: &'a [Tensor]) -> Result<&'a Tensor, DdpError> {
    tensors.first().ok_or_else(|| refused(op, argument, "empty", "at least one tensor"))
}

/// Checks that a tensor matches another in dtype and device, and with [`Shapes::Same`] in shape.
pub(crate) fn same(
    op: &'static str,
    argument: &str,
    one: &Tensor,
    (name, like): (&str, &Tensor),
    shapes: Shapes,
) -> Result<(), DdpError> {
    let differs = one.kind() != like.kind() || one.device() != like.device();
    if differs || (shapes == Shapes::Same && one.size() != like.size()) {
        return Err(refused(op, argument, describe(one), format!("like {name}, {}", describe(like))));
    }
    Ok(())
}

/// Checks that there is one tensor for each rank.
pub(crate) fn one_per_rank(
    group: &ProcessGroup,
    op: &'static str,
    argument: &str,
    tensors: &[Tensor],
) -> Result<(), DdpError> {
    let (found, size) = (tensors.len(), group.size());
    if found == size {
        return Ok(());
    }
    Err(refused(op, argument, format!("a list of {found}"), format!("one tensor per rank, {size} in all")))
}

/// Checks that `whole` has as many elements as one `part` for each rank.
pub(crate) fn whole(
    group: &ProcessGroup,
    op: &'static str,
    (whole_name, whole): (&str, &Tensor),
    (part_name, part): (&str, &Tensor),
) -> Result<(), DdpError> {
    tensor(group, op, whole_name, whole)?;
    tensor(group, op, part_name, part)?;
    same(op, whole_name, whole, (part_name, part), Shapes::Any)?;
    let expected = part.numel() * group.size();
    if whole.numel() == expected {
        return Ok(());
    }
    let found = format!("of {} elements", whole.numel());
    Err(refused(op, whole_name, found, format!("of {expected}: one {part_name} of {} for each rank", part.numel())))
}

/// Checks that each of `wholes` has as many elements as the part of the same index for each rank, and that all have one
/// dtype.
pub(crate) fn wholes(
    group: &ProcessGroup,
    op: &'static str,
    (whole_name, wholes): (&str, &[Tensor]),
    (part_name, parts): (&str, &[Tensor]),
) -> Result<(), DdpError> {
    let first = first(op, part_name, parts)?;
    let (found, expected) = (wholes.len(), parts.len());
    if found != expected {
        return Err(refused(
            op,
            whole_name,
            format!("a list of {found}"),
            format!("as many as {part_name}: {expected}"),
        ));
    }
    list(group, op, part_name, parts, ("the first", first), Shapes::Any)?;
    for (index, (one, part)) in wholes.iter().zip(parts).enumerate() {
        whole(group, op, (&format!("{whole_name}[{index}]"), one), (&format!("{part_name}[{index}]"), part))?;
    }
    Ok(())
}

/// Checks that the backend supports this reduction of this dtype.
pub(crate) fn reduce_op(
    group: &ProcessGroup,
    op: &'static str,
    reduce: ReduceOp,
    kind: Kind,
    device: Device,
) -> Result<(), DdpError> {
    let unsupported = |reason: String| Err(DdpError::Unsupported { op, reason });
    let float = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    let by_nccl = carried_by_nccl(group, device);
    match reduce {
        ReduceOp::PremulSum(_) if !by_nccl => {
            unsupported("only NCCL has premultiplied sums: multiply, then sum".to_owned())
        }
        ReduceOp::PremulSum(_) | ReduceOp::Avg if !float => {
            unsupported(format!("{reduce:?} needs a floating-point dtype, not {kind:?}"))
        }
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor if by_nccl => {
            unsupported(format!("NCCL has no {reduce:?}: use a group over Gloo"))
        }
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor if float => {
            unsupported(format!("{reduce:?} needs whole numbers or bools, not {kind:?}"))
        }
        _ => Ok(()),
    }
}

/// Whether NCCL sends the group's tensors on this device.
pub(crate) fn carried_by_nccl(group: &ProcessGroup, device: Device) -> bool {
    match group.backend() {
        Backend::Nccl => true,
        Backend::GlooAndNccl => matches!(device, Device::Cuda(_)),
        _ => false,
    }
}

/// Describes a tensor without its values: dtype, shape, device, and the strides if it is not contiguous.
pub(crate) fn describe(tensor: &Tensor) -> String {
    if !tensor.defined() {
        return "undefined".to_owned();
    }
    let text = format!("{:?} of shape {:?} on {:?}", tensor.kind(), tensor.size(), tensor.device());
    if let Some(layout) = other_layout(tensor) {
        format!("{layout}, {text}")
    } else if tensor.is_contiguous() {
        text
    } else {
        format!("{text} with strides {:?}", tensor.stride())
    }
}

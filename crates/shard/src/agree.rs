//! Decisions that all ranks of a group make together.

use overdrive_core::{GradientSync, OptimizerError, SyncError};
use overdrive_ddp::{DdpError, ProcessGroup, ReduceOp};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Tensor};

use crate::error::ShardError;

/// Gives every rank the values of all, in rank order. If a rank has an error instead, it gets its own, and the others
/// [`ShardError::OtherRank`].
pub(crate) fn all_have<T, E>(group: &ProcessGroup, what: &'static str, own: Result<T, E>) -> Result<Vec<T>, ShardError>
where
    T: Clone + Serialize + DeserializeOwned,
    E: Into<ShardError>,
{
    built(group, what, own, T::clone).map(|(_, all)| all)
}

/// An error on every rank if this text is not the same on all: it names the first rank whose text differs from rank
/// 0's.
pub(crate) fn on_text(what: &str, texts: &[String]) -> Result<(), ShardError> {
    match texts.iter().position(|text| *text != texts[0]) {
        None => Ok(()),
        Some(rank) => {
            let (found, expected) = (texts[rank].clone(), texts[0].clone());
            Err(ShardError::RanksDisagree { what: what.to_owned(), rank, found, expected })
        }
    }
}

/// An error on every rank if they are given different sizes of buckets, and would send different ones.
pub(crate) fn on_bytes(group: &ProcessGroup, bytes: usize) -> Result<(), ShardError> {
    let all = all_have(group, "setting the size of buckets", Ok::<_, ShardError>(bytes.to_string()))?;
    on_text("the size of buckets in bytes", &all)
}

/// Whether this holds on any rank. The ranks' hosts wait for one another, not for their devices.
pub(crate) fn on_any(group: &ProcessGroup, own: bool) -> Result<bool, ShardError> {
    if group.size() == 1 {
        return Ok(own);
    }
    match GradientSync::sum(group, if own { 1.0 } else { 0.0 }) {
        Ok(sum) => Ok(sum > 0.0),
        Err(SyncError(error)) => Err(match error.downcast::<DdpError>() {
            Ok(own) => (*own).into(),
            Err(other) => OptimizerError::Sync(SyncError(other)).into(),
        }),
    }
}

/// Overwrites a scalar by the largest of all ranks.
pub(crate) fn on_largest(group: &ProcessGroup, scalar: &Tensor) -> Result<(), DdpError> {
    if group.size() == 1 {
        return Ok(());
    }
    // NCCL cannot send what is on the host.
    let to = match group.device() {
        Device::Cpu => scalar.device(),
        gpu => gpu,
    };
    let mut largest = scalar.f_to_device(to)?.f_reshape([1])?;
    group.all_reduce(&mut largest, ReduceOp::Max)?;
    scalar.shallow_clone().f_copy_(&largest.f_reshape(&[0i64; 0][..])?)?;
    Ok(())
}

/// As [`all_have`], of something that stays on the rank and what is told of it.
pub(crate) fn built<U, T, E>(
    group: &ProcessGroup,
    what: &'static str,
    own: Result<U, E>,
    tell: impl FnOnce(&U) -> T,
) -> Result<(U, Vec<T>), ShardError>
where
    T: Serialize + DeserializeOwned,
    E: Into<ShardError>,
{
    let own = own.map_err(Into::into);
    let told = own.as_ref().map(tell).map_err(ShardError::to_string);
    let all: Vec<Result<T, String>> = group.all_gather_object(&told)?;
    let own = own?;
    let of =
        |(rank, one): (usize, Result<T, String>)| one.map_err(|reason| ShardError::OtherRank { what, rank, reason });
    Ok((own, all.into_iter().enumerate().map(of).collect::<Result<_, _>>()?))
}

/// An error on every rank if what they have is not the same: `whole` is what the lines describe, and each line is a
/// part and how it is. Names the first line that differs.
pub(crate) fn on_lines(whole: &str, all: &[Vec<(String, String)>]) -> Result<(), ShardError> {
    let first = &all[0];
    for (rank, lines) in all.iter().enumerate() {
        let differs = |what: &str, found: &str, expected: &str| {
            let (found, expected) = (found.to_owned(), expected.to_owned());
            Err(ShardError::RanksDisagree { what: what.to_owned(), rank, found, expected })
        };
        for (at, ((what, found), (expected_what, expected))) in lines.iter().zip(first).enumerate() {
            if what != expected_what {
                return differs(&format!("number {at} of {whole}"), what, expected_what);
            }
            if found != expected {
                return differs(what, found, expected);
            }
        }
        if lines.len() != first.len() {
            let (found, expected) = (lines.len().to_string(), first.len().to_string());
            return differs(&format!("the number of {whole}"), &found, &expected);
        }
    }
    Ok(())
}

//! Checks through the store that the model is the same on all ranks.

use std::time::Duration;

use overdrive_ffi::c10d::Store;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::DdpError;
use crate::group::ProcessGroup;

/// What ranks compare about one tensor.
#[derive(Serialize, Deserialize, PartialEq)]
struct Described {
    name: String,
    is_parameter: bool,
    what: String,
}

#[derive(Serialize, Deserialize)]
struct Difference {
    what: String,
    rank: usize,
    found: String,
    expected: String,
}

fn describe(params: &[(String, Tensor)], buffers: &[(String, Tensor)]) -> Vec<Described> {
    let one = |is_parameter: bool| {
        move |(name, tensor): &(String, Tensor)| {
            let trained = if is_parameter && !tensor.requires_grad() { ", frozen" } else { "" };
            let what = format!("{:?} of shape {:?}{trained}", tensor.kind(), tensor.size());
            Described { name: name.clone(), is_parameter, what }
        }
    };
    params.iter().map(one(true)).chain(buffers.iter().map(one(false))).collect()
}

/// Compares every rank's model with rank 0's; all ranks get the same result.
///
/// Each rank writes and reads a few keys, so the store's work grows linearly with the number of ranks.
pub(super) fn on_model(
    group: &ProcessGroup,
    params: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Result<(), DdpError> {
    let key = |part: &str| format!("overdrive/model/{part}");
    let number = group.next_agreement();
    let store = group.store().prefixed(&number.to_string())?;
    let failed = |source| DdpError::between(group.context("DistributedDataParallel"), source);
    let own = describe(params, buffers);
    if group.rank() == 0 {
        store.set(&key("rank0"), &written(&own)?).map_err(failed)?;
    } else {
        let theirs: Vec<Described> = read(&store.get(&key("rank0"), group.timeout()).map_err(failed)?)?;
        if let Some(difference) = first_difference(group.rank(), &own, &theirs) {
            store.compare_set(&key("first"), &[], &written(&difference)?).map_err(failed)?;
        }
    }
    // The last rank to arrive writes the verdict: by then all ranks have compared.
    if store.add(&key("done"), 1).map_err(failed)? == group.size() as i64 {
        let first = key("first");
        let verdict: Option<Difference> = if store.check(&[&first]).map_err(failed)? {
            Some(read(&store.get(&first, group.timeout()).map_err(failed)?)?)
        } else {
            None
        };
        store.set(&key("verdict"), &written(&verdict)?).map_err(failed)?;
    }
    match read(&store.get(&key("verdict"), group.timeout()).map_err(failed)?)? {
        None => Ok(()),
        Some(Difference { what, rank, found, expected }) => {
            leave_together(group, &store, &key("seen"), &key("left"));
            Err(DdpError::ModelMismatch { what, rank, found, expected })
        }
    }
}

/// Keeps rank 0, whose process usually serves the store, from ending with the error before all live ranks have read it.
fn leave_together(group: &ProcessGroup, store: &Store, seen: &str, left: &str) {
    const PATIENCE: Duration = Duration::from_secs(60);
    // Failures are ignored here: the mismatch is the error to report.
    let last = store.add(seen, 1).is_ok_and(|count| count == group.size() as i64);
    if last {
        let _ = store.set(left, b"");
    }
    if group.rank() == 0 {
        let _ = store.wait(&[left], PATIENCE.min(group.timeout()));
    }
}

fn first_difference(rank: usize, own: &[Described], theirs: &[Described]) -> Option<Difference> {
    let kind = |one: &Described| if one.is_parameter { "parameter" } else { "buffer" };
    for (index, (one, other)) in own.iter().zip(theirs).enumerate() {
        if one == other {
            continue;
        }
        let difference = if one.name == other.name && one.is_parameter == other.is_parameter {
            let what = format!("the {} {:?}", kind(one), one.name);
            Difference { what, rank, found: one.what.clone(), expected: other.what.clone() }
        } else {
            let named = |one: &Described| format!("the {} {:?}", kind(one), one.name);
            Difference { what: format!("tensor {index}"), rank, found: named(one), expected: named(other) }
        };
        return Some(difference);
    }
    let (found, expected) = (own.len(), theirs.len());
    let what = "the number of parameters and buffers".to_owned();
    (found != expected).then(|| Difference { what, rank, found: found.to_string(), expected: expected.to_string() })
}

fn written<T: Serialize>(value: &T) -> Result<Vec<u8>, DdpError> {
    rmp_serde::to_vec(value).map_err(|source| object("sent", Box::new(source)))
}

fn read<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, DdpError> {
    rmp_serde::from_slice(bytes).map_err(|source| object("read", Box::new(source)))
}

fn object(direction: &'static str, source: Box<dyn std::error::Error + Send + Sync>) -> DdpError {
    DdpError::Object { op: "DistributedDataParallel", rank: 0, direction, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(name: &str, what: &str) -> Described {
        Described { name: name.to_owned(), is_parameter: true, what: what.to_owned() }
    }

    #[test]
    fn the_first_difference_is_named() {
        let theirs = [described("a", "1"), described("b", "2")];
        assert!(first_difference(1, &[described("a", "1"), described("b", "2")], &theirs).is_none());
        let shape = first_difference(1, &[described("a", "1"), described("b", "3")], &theirs).unwrap();
        assert_eq!((&*shape.what, &*shape.found, &*shape.expected), ("the parameter \"b\"", "3", "2"));
        let name = first_difference(1, &[described("x", "1"), described("b", "3")], &theirs).unwrap();
        assert_eq!((&*name.what, &*name.found), ("tensor 0", "the parameter \"x\""));
        let fewer = first_difference(1, &[described("a", "1")], &theirs).unwrap();
        assert_eq!((&*fewer.found, &*fewer.expected), ("1", "2"));
    }
}

//! Decisions that all ranks of a group make together.

use overdrive_ddp::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ShardError;

/// Exchanges what each rank has, or why it has nothing. All ranks get what all have, in their order. If a rank has
/// failed, it gets its own error, and the others get one that names it.
pub(crate) fn all_have<T, E>(group: &ProcessGroup, what: &'static str, own: Result<T, E>) -> Result<Vec<T>, ShardError>
where
    T: Serialize + DeserializeOwned,
    E: Into<ShardError>,
{
    let (sent, failed) = match own {
        Ok(value) => (Ok(value), None),
        Err(error) => {
            let error = error.into();
            (Err(error.to_string()), Some(error))
        }
    };
    let all: Vec<Result<T, String>> = group.all_gather_object(&sent)?;
    if let Some(own) = failed {
        return Err(own);
    }
    let of =
        |(rank, one): (usize, Result<T, String>)| one.map_err(|reason| ShardError::OtherRank { what, rank, reason });
    all.into_iter().enumerate().map(of).collect()
}

/// An error on every rank if this text is not the same on all: it names the first rank whose text differs from rank 0's.
pub(crate) fn on_text(what: &str, texts: &[String]) -> Result<(), ShardError> {
    match texts.iter().position(|text| *text != texts[0]) {
        None => Ok(()),
        Some(rank) => {
            let (found, expected) = (texts[rank].clone(), texts[0].clone());
            Err(ShardError::RanksDisagree { what: what.to_owned(), rank, found, expected })
        }
    }
}

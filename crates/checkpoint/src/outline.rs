//! What a part's whole state has, which ranks have saved together: its tensors' shapes, and where their rows are.

use std::collections::BTreeMap;
use std::ops::Range;

use overdrive_core::safetensors::{kind_of, sizes_of};
use overdrive_core::{Rows, StateDict};
use safetensors::tensor::TensorInfo;
use tch::Kind;

use crate::error::CheckpointError;
use crate::manifest;
use crate::read::Source;

/// The whole state of a part.
pub(crate) struct Outline {
    pub values: StateDict,
    pub tensors: BTreeMap<String, Whole>,
}

/// A tensor of the whole state.
pub(crate) struct Whole {
    pub kind: Kind,
    pub shape: Vec<i64>,
    /// Where its rows are, by the first.
    pub pieces: Vec<Piece>,
}

/// The rank, the name in its file and the first row of each piece.
pub(crate) type Places<'a> = Vec<(usize, &'a str, i64)>;

/// Some rows of a tensor in a rank's file.
pub(crate) struct Piece {
    pub rank: usize,
    /// The tensor's name in the file, which another name may be tied to.
    pub key: String,
    /// Its first byte in the file, and how many.
    pub place: (u64, usize),
    pub first: i64,
    pub count: i64,
}

impl Whole {
    pub fn rows(&self) -> Range<i64> {
        Rows::all(&self.shape)
    }

    pub fn row_bytes(&self) -> usize {
        // Only a tensor without elements can have rows beyond a `usize`.
        (self.shape.iter().skip(1).product::<i64>() as usize).saturating_mul(self.kind.elt_size_in_bytes())
    }

    /// Where its rows are; tied tensors have the same.
    pub fn places(&self) -> Places<'_> {
        self.pieces.iter().map(|piece| (piece.rank, &*piece.key, piece.first)).collect()
    }

    /// The piece that has this row.
    pub fn piece(&self, row: i64) -> Option<&Piece> {
        self.pieces.iter().find(|piece| (piece.first..piece.first + piece.count).contains(&row))
    }

    /// Sorts the pieces; returns the first row that none has. Where there is no such row, the tensor is as large as the
    /// files at most.
    pub fn first_missing(&mut self) -> Option<i64> {
        self.pieces.sort_by_key(|piece| piece.first);
        let mut reached = 0;
        for piece in &self.pieces {
            if piece.first > reached {
                break;
            }
            reached = reached.max(piece.first + piece.count);
        }
        (reached < self.rows().end).then_some(reached)
    }
}

impl Outline {
    /// Names that are tied to others, each with the one under which the tensor is kept.
    pub fn tied(&self) -> BTreeMap<&str, &str> {
        let (mut kept, mut tied) = (BTreeMap::new(), BTreeMap::new());
        for (name, tensor) in &self.tensors {
            let name = name.as_str();
            let before = *kept.entry(tensor.places()).or_insert(name);
            if before != name {
                tied.insert(name, before);
            }
        }
        tied
    }
}

impl Piece {
    /// Of a tensor in a rank's file: its dtype, the whole one's shape, and where these rows of it are.
    pub fn of(
        source: &Source<'_>,
        rank: usize,
        (key, info): (&str, &TensorInfo),
        start: u64,
        rows: Option<&manifest::Rows>,
    ) -> Result<(Kind, Vec<i64>, Self), CheckpointError> {
        let kind = kind_of(info.dtype);
        let kind = kind.ok_or_else(|| source.damaged(key, "a dtype that tch has", format!("{:?}", info.dtype)))?;
        let own = sizes_of(info);
        let own = own.ok_or_else(|| source.damaged(key, "a shape below 2^63", format!("{:?}", info.shape)))?;
        let count = Rows::all(&own).end;
        let (first, whole) = rows.map_or((0, &own), |rows| (rows.first, &rows.whole));
        if let Some(rows) = rows.filter(|rows| !rows.fit(&own)) {
            return Err(source.damaged(key, rows, format!("a tensor of shape {own:?}")));
        }
        let (begin, end) = info.data_offsets;
        let place = (start + begin as u64, end - begin);
        Ok((kind, whole.clone(), Self { rank, key: key.to_owned(), place, first, count }))
    }
}

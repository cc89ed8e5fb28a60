//! A part of which each rank has some rows, and runs that save and resume it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers};
use overdrive_core::{Entry, RankGroup, Rows, RowsToLoad, Shapes, Shard, ShardedBy, StateDict, StateError, Stateful};
use tch::{Device, Kind, Tensor};

use crate::group::{Rank, run};
use crate::{model, value};

/// Uneven rows, several blocks of checksums, fewer rows than ranks, no dimensions, and a dtype of one byte.
pub fn wholes(value: f64) -> Vec<(&'static str, Tensor)> {
    let numbers =
        |shape: &[i64]| (Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)) + value).view(shape);
    vec![
        ("large", numbers(&[1301, 700])),
        ("few", numbers(&[2, 3])),
        ("flags", numbers(&[5]).remainder(2.0).to_kind(Kind::Bool)),
        ("half", numbers(&[7, 2]).to_kind(Kind::BFloat16)),
        ("step", Tensor::from(value)),
    ]
}

/// Of each tensor the rows that `torch.chunk` gives to this rank of so many.
pub struct Sharded {
    shard: Shard,
    pub wholes: Vec<(&'static str, Tensor)>,
    /// What was loaded.
    pub found: Vec<(&'static str, Tensor)>,
}

impl Sharded {
    pub fn new(rank: usize, ranks: usize, value: f64) -> Self {
        Self { shard: Shard { rank, ranks, by: ShardedBy::Rows }, wholes: wholes(value), found: Vec::new() }
    }

    fn rows(&self, shape: &[i64]) -> Range<i64> {
        let Some(&rows) = shape.first() else { return 0..1 };
        let part = (rows + self.shard.ranks as i64 - 1) / self.shard.ranks as i64;
        let first = (part * self.shard.rank as i64).min(rows);
        first..(first + part).min(rows)
    }

    fn own(&self, whole: &Tensor) -> Tensor {
        let rows = self.rows(&whole.size());
        if whole.dim() == 0 { whole.shallow_clone() } else { whole.narrow(0, rows.start, rows.end - rows.start) }
    }

    /// Exactly this rank's rows of these wholes were loaded.
    pub fn check(&self, value: f64) {
        assert_eq!(self.found.len(), self.wholes.len());
        for ((name, whole), (_, found)) in wholes(value).iter().zip(&self.found) {
            assert!(found.kind() == whole.kind() && found.equal(&self.own(whole)), "{name} on {}", self.shard);
        }
    }
}

impl Stateful for Sharded {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::of_shard(self.shard);
        for (name, whole) in &self.wholes {
            match whole.dim() {
                0 => state.insert(*name, Entry::Tensor(whole.shallow_clone())),
                _ => {
                    let first = self.rows(&whole.size()).start;
                    state.insert_rows(*name, self.own(whole), Rows { first, whole: whole.size() });
                }
            }
        }
        state.insert("groups", Entry::Int(2));
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        state.check_shard(Some(self.shard))?;
        assert_eq!(state.int("groups")?, 2);
        let load = |(name, whole): &(&'static str, Tensor)| {
            let (shape, kind) = (whole.size(), whole.kind());
            Ok((*name, state.tensor_rows(name, &shape, self.rows(&shape), kind)?.copy()))
        };
        self.found = self.wholes.iter().map(load).collect::<Result<_, StateError>>()?;
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.shard.ranks > 1
    }

    fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        assert_eq!(values.int("groups")?, 2);
        Ok(shapes.iter().map(|(key, shape)| (key.clone(), self.rows(shape))).collect())
    }
}

/// Saves these steps on so many ranks, with the step as value.
pub fn save(folder: &Path, ranks: usize, steps: &[u64]) {
    run(Rank::group(ranks, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.set("ranks", &ranks).unwrap();
        for &step in steps {
            let (sharded, vs) = (Sharded::new(number, ranks, step as f64), model(step as f64));
            checkpoint.save(step, &[("sharded", &sharded), ("model", &vs)]).unwrap();
        }
        checkpoint.finish().unwrap();
    });
}

/// What ranks have resumed at, or their errors; what was loaded is compared.
pub fn resume(folder: &Path, ranks: usize) -> Vec<Result<Option<u64>, CheckpointError>> {
    run(Rank::group(ranks, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build()?;
        let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
        let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)])?;
        if let Some(resumed) = &resumed {
            sharded.check(resumed.step as f64);
            assert_eq!(value(&vs), resumed.step as f64);
            assert!(checkpoint.get::<usize>("ranks").unwrap().is_some());
        }
        Ok(resumed.map(|resumed| resumed.step))
    })
}

/// Where all ranks have resumed.
pub fn resumed_at(folder: &Path, ranks: usize) -> Option<u64> {
    let mut found: Vec<_> = resume(folder, ranks).into_iter().map(|found| found.unwrap()).collect();
    found.dedup();
    assert_eq!(found.len(), 1, "all at the same step");
    found[0]
}

/// The folder of a rank's step.
pub fn step(folder: &Path, rank: usize, step: u64) -> PathBuf {
    folder.join(format!("rank-{rank}/step-{step:012}"))
}

//! A stream that ranks share: what they have saved, another number of ranks resumes.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::{CheckpointError, Writers};
use overdrive::prelude::*;
use overdrive_dataload::FnStream;

use crate::harness::{Meeting, all_through, free_port, start};
use crate::moments;

/// How many batches have been trained on before.
const BEFORE: usize = 3;

fn loader(rank: usize, ranks: usize) -> Result<DataLoader<Vec<usize>>> {
    let numbers = FnStream::new(4, |shard| Ok((0..40).map(move |item| Ok(shard * 1000 + item))));
    let stream = DataLoader::stream(numbers).batch_size(8 / ranks).rank(rank, ranks).batches_per_epoch(20);
    Ok(stream.collate(|samples: Vec<usize>| Ok(samples)).build()?)
}

pub fn are_resumed_by_others() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("a folder of ASCII letters")?;
    let (port, started) = (free_port(), Instant::now());
    let begin = |rank| start("streams", rank, 2, port, &[(moments::FOLDER, path)]);
    all_through((0..2).map(begin).collect::<Result<Vec<_>>>()?, started).map(drop)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let (group, folder) = (meeting.group()?, crate::folder()?);
    let own = loader(group.rank(), group.size())?;
    own.iter().take(BEFORE).try_for_each(|batch| batch.map(drop))?;
    // Rank 0's state is not that of all.
    let mut first = Checkpoint::builder(folder.join("first")).ranks(group.clone(), Writers::First).build()?;
    let told = first.save(1, &[("data", &own)]).err().context("rank 0's was saved for all")?;
    ensure!(matches!(told, CheckpointError::OwnOfRank { .. }), "{told}");
    let mut checkpoint = Checkpoint::builder(folder.join("each")).ranks(group.clone(), Writers::Each).build()?;
    checkpoint.save(1, &[("data", &own)])?;
    checkpoint.finish()?;
    group.barrier()?;
    if group.rank() == 0 {
        let mut alone = loader(0, 1)?;
        let expected: Vec<Vec<usize>> = alone.iter().skip(BEFORE).collect::<Result<_, _>>()?;
        let mut checkpoint = Checkpoint::builder(folder.join("each")).build()?;
        let resumed = checkpoint.resume(&mut [("data", &mut alone)])?.context("nothing was saved")?;
        ensure!(resumed.left_out.is_empty());
        let rest: Vec<Vec<usize>> = alone.iter().collect::<Result<_, _>>()?;
        // The epoch was left early: the next one goes on from there, and is longer.
        ensure!(expected.len() == 20 - BEFORE && rest.starts_with(&expected), "{rest:?} in place of {expected:?}");
    }
    Ok(group.barrier()?)
}

//! Streams of documents packed to one length, and texts tokenized by the workers.

use overdrive_core::Stateful;
use overdrive_dataload::{
    Cancellation, DataError, DataLoader, Deferred, FnStream, IterableDataset, JoinPacks, OnError, PackedTokens,
    Packing, Samples,
};

use crate::{WORKERS, alone};

const SHARDS: usize = 5;

/// Documents of 0 to 18 tokens, which say where they are from; document 3 of shard 2 is bad.
fn documents() -> impl IterableDataset<Sample = Vec<i64>> + Clone {
    FnStream::new(SHARDS, |shard| {
        Ok((0..20_usize).map(move |at| match (shard, at) {
            (2, 3) => Err(DataError::other("a bad document")),
            _ => Ok((0..(at * 7 + shard) % 19).map(|token| (shard * 10_000 + at * 100 + token) as i64).collect()),
        }))
    })
}

fn all(packs: &impl IterableDataset<Sample = overdrive_dataload::Pack>, shard: usize) -> Vec<Vec<i64>> {
    packs.stream([shard]).flatten().map(|pack| pack.tokens).collect()
}

#[test]
fn packs_are_full_and_hold_every_token_in_order() -> Result<(), DataError> {
    for length in [1, 7, 16, 64, 1000] {
        for shard in 0..SHARDS {
            let tokens: Vec<i64> = documents().stream([shard]).flatten().flatten().collect();
            let kept = all(&Packing::new(documents(), length)?.keep_last(true), shard);
            assert_eq!(kept.concat(), tokens);
            let full = all(&Packing::new(documents(), length)?, shard);
            assert!(full.iter().all(|pack| pack.len() == length));
            assert_eq!(full.len(), tokens.len() / length);
            assert_eq!(full, kept[..full.len()]);
            for pack in Packing::new(documents(), length)?.stream([shard]).flatten() {
                let (mut at, mut last) = (0, None);
                for piece in pack.lengths {
                    let document = pack.tokens[at] / 100;
                    // A piece is of one document, and the next one of another.
                    assert!(pack.tokens[at..at + piece].windows(2).all(|pair| pair[0] + 1 == pair[1]));
                    assert!(pack.tokens[at..at + piece].iter().all(|token| token / 100 == document));
                    assert!(piece > 0 && last.replace(document) != Some(document));
                    at += piece;
                }
                assert_eq!(at, length);
            }
        }
    }
    assert!(Packing::new(documents(), 0).is_err());
    Ok(())
}

#[test]
fn a_shard_opened_in_its_middle_gives_the_rest() -> Result<(), DataError> {
    let packs = Packing::new(documents(), 16)?;
    let seen = |position| {
        let items = packs.open_shard(2, position).unwrap();
        items.map(|item| item.map_err(|error| error.to_string())).collect::<Vec<_>>()
    };
    let whole = seen(0);
    assert!(whole.iter().any(Result::is_err));
    for position in 0..=whole.len() + 1 {
        assert_eq!(seen(position as u64), whole[position.min(whole.len())..]);
    }
    Ok(())
}

type Seen = (Vec<i64>, Vec<i32>);

fn seen(batch: &PackedTokens) -> Seen {
    let values = |tensor: &tch::Tensor| Vec::<i64>::try_from(tensor.to_kind(tch::Kind::Int64)).unwrap();
    (values(&batch.input_ids), values(&batch.cu_seqlens).into_iter().map(|end| end as i32).collect())
}

#[test]
fn a_loader_resumes_at_every_pack() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers, length| {
        DataLoader::stream(Packing::new(documents(), length)?)
            .batch_size(2)
            .shuffle(true)
            .interleave(3)
            .shuffle_buffer(4)
            .num_workers(workers)
            .on_error(OnError::Skip)
            .collate(JoinPacks)
            .build()
    };
    let expected: Vec<Seen> = build(0, 16)?.iter().map(|batch| Ok(seen(&batch?))).collect::<Result<_, DataError>>()?;
    assert!(expected.len() > 15);
    for (tokens, ends) in &expected {
        assert!(tokens.len().is_multiple_of(16) && ends.last() == Some(&(tokens.len() as i32)));
    }
    for workers in WORKERS {
        let whole = build(workers, 16)?.iter().map(|batch| Ok(seen(&batch?))).collect::<Result<Vec<_>, DataError>>()?;
        assert_eq!(whole, expected);
        for given in [1, expected.len() / 2, expected.len() - 1] {
            let first = build(workers, 16)?;
            first.iter().take(given).try_for_each(|batch| batch.map(drop))?;
            let state = first.state_dict().map_err(DataError::other)?;
            let mut second = build(workers, 16)?;
            second.load_state_dict(&state).map_err(DataError::other)?;
            let rest = second.iter().map(|batch| Ok(seen(&batch?))).collect::<Result<Vec<_>, DataError>>()?;
            assert_eq!(rest, expected[given..], "{workers} workers, {given} batches");
            // Packs of another length are others.
            assert!(build(workers, 8)?.load_state_dict(&state).is_err());
        }
    }
    Ok(())
}

/// Each shard has `4 * (shard + 1)` packs of 8 tokens.
fn uneven() -> impl IterableDataset<Sample = Vec<i64>> + Clone {
    FnStream::new(4, |shard| Ok((0..4 * (shard + 1)).map(move |at| Ok(vec![(shard * 100 + at) as i64; 8]))))
}

#[test]
fn ranks_share_the_packs_and_have_as_many_batches_as_asked() -> Result<(), DataError> {
    let _alone = alone();
    let build = |rank, batches| {
        let loader = DataLoader::stream(Packing::new(uneven(), 8)?).batch_size(2).rank(rank, 2).collate(JoinPacks);
        match batches {
            Some(batches) => loader.batches_per_epoch(batches).build(),
            None => loader.build(),
        }
    };
    let run = |rank, batches| {
        let loader = build(rank, batches)?;
        let first = |batch: Result<PackedTokens, DataError>| Ok(seen(&batch?).0);
        loader.iter().map(first).collect::<Result<Vec<_>, DataError>>()
    };
    // By shards: each token once, and not as many batches on each rank.
    let [one, other] = [run(0, None)?, run(1, None)?];
    let mut firsts: Vec<i64> = one.concat().into_iter().chain(other.concat()).step_by(8).collect();
    firsts.sort_unstable();
    let expected: Vec<i64> = (0..4).flat_map(|shard| (0..4 * (shard + 1)).map(move |at| shard * 100 + at)).collect();
    assert_eq!(firsts, expected);
    assert_ne!(one.len(), other.len());
    for rank in 0..2 {
        assert_eq!(run(rank, Some(9))?.len(), 9);
    }
    Ok(())
}

#[test]
fn a_bad_document_is_named() -> Result<(), DataError> {
    let _alone = alone();
    struct Books;

    impl IterableDataset for Books {
        type Sample = Vec<i64>;

        fn shards(&self) -> usize {
            1
        }

        fn open_shard(&self, _: usize, _: u64) -> Result<Samples<Vec<i64>>, DataError> {
            unreachable!("a loader opens deferred samples")
        }

        fn open_deferred(&self, _: usize, _: u64, _: &Cancellation) -> Result<Samples<Deferred<Vec<i64>>>, DataError> {
            Ok(Box::new((0..30).map(|at| {
                let document = Deferred::later(move || match at {
                    17 => Err(DataError::other("no UTF-8")),
                    _ => Ok(vec![at; 5]),
                });
                Ok(document.named(format!("books/{at:04}")))
            })))
        }
    }

    let loader = DataLoader::stream(Packing::new(Books, 16)?).on_error(OnError::Skip).collate(JoinPacks).build()?;
    assert_eq!(loader.iter().filter(Result::is_ok).count(), 29 * 5 / 16);
    let faults = loader.faults();
    assert_eq!((faults.len(), faults[0].key.as_deref()), (1, Some("books/0017")));
    assert!(faults[0].error.ends_with("(books/0017): no UTF-8"), "{faults:?}");
    // Without a name, by its number.
    let loader = DataLoader::stream(Packing::new(documents(), 16)?).collate(JoinPacks).build()?;
    let error = loader.iter().find_map(Result::err).map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("document 3") && error.contains("a bad document"), "{error}");
    Ok(())
}

#[test]
fn packs_may_be_as_long_as_a_shard() -> Result<(), DataError> {
    let whole = Packing::new(documents(), usize::MAX)?.keep_last(true);
    assert_ne!(whole.fingerprint(), Packing::new(documents(), usize::MAX)?.fingerprint());
    let packs = all(&whole, 1);
    assert_eq!((packs.len(), packs.concat()), (1, documents().stream([1]).flatten().flatten().collect()));
    Ok(())
}

#[cfg(feature = "tokenizers")]
mod texts {
    use std::path::{Path, PathBuf};

    use overdrive_dataload::Tokenizer;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", name].iter().collect()
    }

    /// Texts, and the tokens that Python gives them.
    fn texts() -> Vec<(String, Vec<i64>)> {
        let text = std::fs::read(fixture("tokenizer-texts.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    #[test]
    fn tokens_are_those_of_python() -> Result<(), DataError> {
        let tokenizer = Tokenizer::from_file(fixture("tokenizer.json"))?;
        assert_eq!((tokenizer.vocab_size(), tokenizer.token_to_id("<|end|>")), (320, Some(0)));
        for (text, tokens) in texts() {
            assert_eq!(tokenizer.encode(&text)?, tokens, "{text:?}");
            assert_eq!(tokenizer.decode(&tokens)?, text.replace("<|end|>", ""));
        }
        let ended = tokenizer.clone().end_of_text("<|end|>")?;
        assert_eq!(ended.encode("")?, [0]);
        assert!(ended.end_of_text("none such").is_err() && tokenizer.decode(&[-1]).is_err());
        for json in [&b"{}"[..], b"", b"[", b"\xff"] {
            let error = Tokenizer::from_bytes(json, Path::new("some.json")).unwrap_err().to_string();
            assert!(error.contains("some.json"), "{error}");
        }
        assert!(Tokenizer::from_file("none.json").unwrap_err().to_string().contains("none.json"));
        Ok(())
    }

    #[test]
    fn workers_tokenize_and_pack() -> Result<(), DataError> {
        let _alone = alone();
        let tokenizer = Tokenizer::from_file(fixture("tokenizer.json"))?.end_of_text("<|end|>")?;
        let stream = || {
            let texts = texts();
            FnStream::new(4, move |shard| {
                let texts = texts.clone();
                Ok((0..40).map(move |at| Ok(texts[(at + shard) % texts.len()].0.clone())))
            })
        };
        let expected: Vec<i64> = (0..40).flat_map(|at| [&texts()[at % texts().len()].1[..], &[0]].concat()).collect();
        let packs = Packing::new(stream().map(tokenizer.encoder()), 32)?;
        assert_eq!(all(&packs, 0).concat(), expected[..expected.len() / 32 * 32]);
        let build = |workers| {
            let packs = Packing::new(stream().map(tokenizer.encoder()), 32)?;
            let loader = DataLoader::stream(packs).batch_size(3).interleave(4).num_workers(workers);
            loader.collate(JoinPacks).build()
        };
        let run =
            |workers| build(workers)?.iter().map(|batch| Ok(seen(&batch?))).collect::<Result<Vec<_>, DataError>>();
        let alone = run(0)?;
        assert!(alone.len() > 5 && alone[0].0.len() == 96);
        assert_eq!((run(1)?, run(3)?), (alone.clone(), alone));
        Ok(())
    }
}

//! Orders drawn from PyTorch's generators, and their resumption.

use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_dataload::{
    DataError, DataLoader, FnDataset, Generator, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler,
};
use overdrive_ffi::rng;
use tch::{Device, Kind, Tensor};

/// The tests run one at a time, because they share libtorch's generator.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

const LEN: usize = 23;

fn loader(generator: Option<Generator>, sampler: Option<Box<dyn Sampler>>) -> DataLoader<Vec<usize>> {
    let builder = DataLoader::builder(FnDataset::new(LEN, Ok)).batch_size(4).generator(generator);
    let builder = match sampler {
        Some(sampler) => builder.sampler(sampler),
        None => builder.shuffle(true),
    };
    builder.collate(|samples: Vec<usize>| Ok(samples)).build().unwrap()
}

fn epoch(loader: &DataLoader<Vec<usize>>) -> Result<Vec<usize>, DataError> {
    Ok(loader.iter().collect::<Result<Vec<_>, _>>()?.concat())
}

/// PyTorch's seed of a sampler or of workers, from libtorch's own generator.
fn random() -> u64 {
    Tensor::zeros([1], (Kind::Int64, Device::Cpu)).random_().int64_value(&[0]) as u64
}

fn permutation() -> Vec<usize> {
    let order = Tensor::randperm(LEN as i64, (Kind::Int64, Device::Cpu));
    Vec::<i64>::try_from(order).unwrap().into_iter().map(|index| index as usize).collect()
}

#[test]
fn the_default_generator_draws_as_libtorch_does_and_continues() -> Result<(), DataError> {
    let _turn = turn();
    let loader = loader(None, None);
    tch::manual_seed(3);
    let found = [epoch(&loader)?, epoch(&loader)?];
    let next = Tensor::rand([4], (Kind::Float, Device::Cpu));
    tch::manual_seed(3);
    for found in &found {
        let _workers = random();
        let seed = random();
        let state = rng::state(Device::Cpu)?;
        tch::manual_seed(seed as i64);
        assert_eq!(*found, permutation());
        rng::set_state(Device::Cpu, &state)?;
    }
    assert_ne!(found[0], found[1]);
    assert_eq!(Tensor::rand([4], (Kind::Float, Device::Cpu)), next);
    Ok(())
}

#[test]
fn a_generator_of_its_own_leaves_libtorchs_alone() -> Result<(), DataError> {
    let _turn = turn();
    let loader = loader(Some(Generator::manual_seed(8)), None);
    let before = rng::state(Device::Cpu)?;
    let found = [epoch(&loader)?, epoch(&loader)?];
    assert_eq!(rng::state(Device::Cpu)?, before);
    tch::manual_seed(8);
    for found in found {
        let _workers = random();
        assert_eq!(found, permutation());
        let _unused = permutation();
    }
    Ok(())
}

#[test]
fn without_shuffling_only_the_workers_seed_is_drawn() -> Result<(), DataError> {
    let _turn = turn();
    let builder = DataLoader::builder(FnDataset::new(LEN, Ok)).batch_size(4).generator(None);
    let loader = builder.collate(|samples: Vec<usize>| Ok(samples)).build()?;
    tch::manual_seed(3);
    assert_eq!(epoch(&loader)?, (0..LEN).collect::<Vec<_>>());
    let next = random();
    tch::manual_seed(3);
    assert_ne!(random(), next);
    assert_eq!(random(), next);
    Ok(())
}

type MakeSampler = fn() -> Option<Box<dyn Sampler>>;

fn samplers() -> [MakeSampler; 5] {
    [
        || None,
        || Some(Box::new(RandomSampler::new(LEN, 0).replacement(true).num_samples(50).unwrap())),
        || Some(Box::new(SubsetRandomSampler::new((3..20).collect::<Vec<_>>(), 0))),
        || Some(Box::new(WeightedRandomSampler::new(vec![1.0; LEN], 40, 0).unwrap())),
        || Some(Box::new(WeightedRandomSampler::new(vec![1.0; LEN], 9, 0).unwrap().replacement(false).unwrap())),
    ]
}

#[test]
fn a_resumed_run_sees_the_rest_and_the_same_epochs_after_it() -> Result<(), Box<dyn std::error::Error>> {
    let _turn = turn();
    for own in [None, Some(Generator::manual_seed(5))] {
        for sampler in samplers() {
            for taken in [0, 1, 2] {
                tch::manual_seed(11);
                let whole = loader(own.clone(), sampler());
                epoch(&whole)?;
                let mut second = whole.iter();
                let mut had = second.by_ref().take(taken).collect::<Result<Vec<_>, _>>()?.concat();
                let (saved, torch) = (whole.state_dict()?.copied()?, rng::state(Device::Cpu)?);
                assert_eq!(rng::state(Device::Cpu)?, torch, "saving draws nothing");
                let rest = second.collect::<Result<Vec<_>, _>>()?.concat();
                let expected = (rest.clone(), epoch(&whole)?, epoch(&whole)?, rng::state(Device::Cpu)?);

                tch::manual_seed(99);
                let mut resumed = loader(own.as_ref().map(|_| Generator::manual_seed(77)), sampler());
                resumed.load_state_dict(&saved)?;
                // What is saved again before the first batch is the same.
                assert_eq!(format!("{:?}", resumed.state_dict()?), format!("{saved:?}"));
                rng::set_state(Device::Cpu, &torch)?;
                let found = (epoch(&resumed)?, epoch(&resumed)?, epoch(&resumed)?, rng::state(Device::Cpu)?);
                assert_eq!(found, expected);
                had.extend(rest);
                assert_ne!(had, expected.1);
            }
        }
    }
    Ok(())
}

#[test]
fn between_epochs_a_state_draws_nothing() -> Result<(), Box<dyn std::error::Error>> {
    let _turn = turn();
    for own in [None, Some(Generator::manual_seed(5))] {
        tch::manual_seed(2);
        let first = loader(own.clone(), None);
        epoch(&first)?;
        let (saved, torch) = (first.state_dict()?.copied()?, rng::state(Device::Cpu)?);
        assert_eq!(saved.get("generator").is_ok(), own.is_some());
        let expected = epoch(&first)?;
        let mut second = loader(own, None);
        second.load_state_dict(&saved)?;
        rng::set_state(Device::Cpu, &torch)?;
        assert_eq!(epoch(&second)?, expected);
    }
    Ok(())
}

#[test]
fn states_of_other_orders_are_refused() -> Result<(), Box<dyn std::error::Error>> {
    let _turn = turn();
    let mut drawn = loader(Some(Generator::manual_seed(5)), None);
    let mut plain = DataLoader::builder(FnDataset::new(LEN, Ok))
        .batch_size(4)
        .shuffle(true)
        .collate(|it: Vec<usize>| Ok(it))
        .build()?;
    assert!(drawn.load_state_dict(&plain.state_dict()?).is_err());
    assert!(plain.load_state_dict(&drawn.state_dict()?).is_err());
    let _batch = drawn.iter().next();
    let with = |entry: Option<Entry>| {
        let mut state = StateDict::new();
        for (key, entry) in drawn.state_dict().unwrap().iter().filter(|(key, _)| *key != "generator") {
            match entry {
                Entry::Int(value) => state.insert(key, Entry::Int(*value)),
                Entry::Text(text) => state.insert(key, Entry::Text(text.clone())),
                other => panic!("{other:?}"),
            }
        }
        entry.into_iter().for_each(|entry| state.insert("generator", entry));
        state
    };
    let (missing, wrong) = (with(None), with(Some(Entry::Tensor(Tensor::zeros([5056], (Kind::Uint8, Device::Cpu))))));
    assert!(matches!(drawn.load_state_dict(&missing), Err(StateError::Missing { key }) if key == "generator"));
    assert!(matches!(drawn.load_state_dict(&wrong), Err(StateError::Mismatch { key, .. }) if key == "generator"));
    Ok(())
}

#[test]
fn another_sampler_is_noticed_beside_a_generator() -> Result<(), Box<dyn std::error::Error>> {
    let _turn = turn();
    let with = |order: Vec<usize>| {
        let loader = DataLoader::builder(FnDataset::new(6, Ok)).batch_size(2).sampler(order);
        loader.generator(Generator::manual_seed(0)).collate(|it: Vec<usize>| Ok(it)).build()
    };
    let first = with(vec![0, 1, 2, 3, 4, 5])?;
    let _batch = first.iter().next();
    let state = first.state_dict()?;
    assert!(matches!(
        with(vec![5, 4, 1, 0, 3, 2])?.load_state_dict(&state),
        Err(StateError::Mismatch { key, .. }) if key == "order"
    ));
    with(vec![0, 1, 2, 3, 4, 5])?.load_state_dict(&state)?;
    Ok(())
}

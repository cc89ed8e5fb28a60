//! Samplers and collation, compared with those of `torch.utils.data`.

use anyhow::{Context, Result};
use overdrive_dataload::{
    BatchSampler, Collate, DataLoader, Dataset, DistributedSampler, FixedBatches, FnDataset, Generator, Image,
    PackTokens, PointCloud, RandomSampler, Sampler, SequentialSampler, Stack, StackPoints, SubsetRandomSampler,
    WeightedRandomSampler, random_split, split_lengths,
};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

fn indices(values: &[usize]) -> Tensor {
    Tensor::from_slice(&values.iter().map(|&value| value as i64).collect::<Vec<_>>())
}

/// The indices in rising order.
fn sorted(values: &[usize]) -> Tensor {
    indices(values).sort(0, false).0
}

/// Records, for each number below `of`, its share of `drawn`, and whether it occurs at all.
fn put_shares(found: &mut Found, name: &str, drawn: impl IntoIterator<Item = usize>, of: usize, draws: usize) {
    let mut counts = vec![0.0; of];
    drawn.into_iter().for_each(|index| counts[index] += 1.0);
    let shares = Tensor::from_slice(&counts) / draws as f64;
    found.insert(format!("{name}.possible"), &shares.gt(0.0));
    found.insert(name, &shares);
}

pub fn sampler_distributed(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (len, world) in given.value::<Vec<(usize, usize)>>("grid")? {
        for drop_last in [false, true] {
            let (mut orders, mut lens) = (Vec::new(), Vec::new());
            for rank in 0..world {
                let sampler = DistributedSampler::new(SequentialSampler::new(len), world, rank)?.drop_last(drop_last);
                orders.extend(sampler.order(0));
                lens.push(sampler.len());
            }
            let name = format!("{len}.{world}.{drop_last}");
            let share = (orders.len() / world) as i64;
            found.insert(format!("{name}.len"), &indices(&lens));
            found.insert(name, &indices(&orders).view([world as i64, share]));
        }
    }
    let [len, world] = given.value::<[usize; 2]>("shuffled")?;
    let dealt = |epoch| -> Result<Tensor> {
        let part = |rank| Ok(indices(&DistributedSampler::shuffled(len, world, rank, 5)?.order(epoch)));
        let parts = (0..world).map(part).collect::<Result<Vec<_>>>()?;
        Ok(Tensor::stack(&parts, 1).flatten(0, 1))
    };
    let (order, next) = (dealt(0)?, dealt(1)?);
    let padding = order.size()[0] - len as i64;
    found.insert("shuffled.all", &order.narrow(0, 0, len as i64).sort(0, false).0);
    let end = order.narrow(0, len as i64, padding);
    found.insert("shuffled.padded_from_the_start", &end.eq_tensor(&order.narrow(0, 0, padding)));
    found.insert("shuffled.epochs_differ", &Tensor::from(!order.equal(&next)));
    Ok(found)
}

pub fn sampler_batches(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (len, size) in given.value::<Vec<(usize, usize)>>("grid")? {
        for drop_last in [false, true] {
            let sampler = FixedBatches::new(SequentialSampler::new(len), size, drop_last)?;
            let plan = sampler.plan(0);
            let name = format!("{len}.{size}.{drop_last}");
            found.insert(format!("{name}.len"), &Tensor::from(sampler.len() as i64));
            found.insert(format!("{name}.sizes"), &indices(&plan.batches().map(<[_]>::len).collect::<Vec<_>>()));
            found.insert(name, &indices(&plan.batches().flatten().copied().collect::<Vec<_>>()));
        }
    }
    Ok(found)
}

pub fn sampler_random(given: &Given<'_>) -> Result<Found> {
    let (mut found, len) = (Found::default(), 12);
    for count in given.value::<Vec<usize>>("counts")? {
        let order = RandomSampler::new(len, 1).num_samples(count)?.order(0);
        let (whole, rest) = order.split_at(count / len * len);
        let rows = indices(whole).view([(count / len) as i64, len as i64]);
        found.insert(format!("{count}.whole"), &rows.sort(1, false).0);
        let mut rest = rest.to_vec();
        rest.sort_unstable();
        rest.dedup();
        found.insert(format!("{count}.distinct"), &indices(&[order.len(), rest.len()]));
    }
    let draws = given.value("draws")?;
    let order = RandomSampler::new(len, 2).replacement(true).num_samples(draws)?.order(0);
    put_shares(&mut found, "replacement", order, len, draws);
    found.insert("subset", &sorted(&SubsetRandomSampler::new(given.value::<Vec<usize>>("indices")?, 3).order(0)));
    Ok(found)
}

pub fn sampler_weighted(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (weights, draws) = (given.value::<Vec<f64>>("weights")?, given.value::<usize>("draws")?);
    let of = weights.len();
    put_shares(&mut found, "replacement", WeightedRandomSampler::new(weights.clone(), draws, 1)?.order(0), of, draws);
    let pairs = WeightedRandomSampler::new(weights.clone(), 2, 2)?.replacement(false)?;
    let pair = |epoch| match pairs.order(epoch)[..] {
        [first, second] => Ok(first * of + second),
        ref other => anyhow::bail!("{} draws instead of 2", other.len()),
    };
    let drawn = (0..draws as u64).map(pair).collect::<Result<Vec<_>>>()?;
    put_shares(&mut found, "successive", drawn, of * of, draws);
    found.insert("successive.all", &sorted(&WeightedRandomSampler::new(weights, 5, 3)?.replacement(false)?.order(0)));

    let mut refused = Vec::new();
    for (texts, count, replacement) in given.value::<Vec<(Vec<String>, usize, bool)>>("attempts")? {
        let weights = texts.iter().map(|text| text.parse()).collect::<Result<Vec<f64>, _>>().context("a weight")?;
        let sampler = WeightedRandomSampler::new(weights, count, 0).and_then(|all| all.replacement(replacement));
        refused.push(sampler.is_err());
    }
    found.insert("refused", &Tensor::from_slice(&refused));
    Ok(found)
}

#[derive(Deserialize)]
struct TorchOrder {
    kind: String,
    n: usize,
    batch: usize,
    drop_last: bool,
    replacement: bool,
    num_samples: Option<usize>,
    indices: Vec<usize>,
    weights: Vec<f64>,
    own_seed: u64,
    seed: Option<u64>,
}

impl TorchOrder {
    /// The sampler; none if the loader has its own.
    fn sampler(&self) -> Result<Option<Box<dyn Sampler>>> {
        let num_samples = self.num_samples.unwrap_or(self.n);
        Ok(match self.kind.as_str() {
            "random" => {
                let sampler = RandomSampler::new(self.n, 0).replacement(self.replacement).num_samples(num_samples)?;
                Some(Box::new(sampler))
            }
            "subset" => Some(Box::new(SubsetRandomSampler::new(self.indices.clone(), 0))),
            "weighted" => {
                let sampler = WeightedRandomSampler::new(self.weights.clone(), num_samples, 0)?;
                Some(Box::new(sampler.replacement(self.replacement)?))
            }
            "distributed" => {
                let order = RandomSampler::new(self.n, self.own_seed).torch_order(true);
                Some(Box::new(DistributedSampler::new(order, 3, 1)?.drop_last(true)))
            }
            _ => None,
        })
    }

    fn loader(&self, workers: usize) -> Result<DataLoader<Vec<usize>>> {
        let builder = DataLoader::builder(FnDataset::new(self.n, Ok)).batch_size(self.batch).drop_last(self.drop_last);
        let builder = builder.num_workers(workers).shuffle(self.kind == "shuffle");
        let builder = builder.generator(self.seed.map(Generator::manual_seed));
        let builder = match self.sampler()? {
            Some(sampler) => builder.sampler(sampler),
            None => builder,
        };
        Ok(builder.collate(|samples: Vec<usize>| Ok(samples)).build()?)
    }
}

fn uniform(count: i64) -> Tensor {
    Tensor::rand([count], (Kind::Float, Device::Cpu))
}

pub fn sampler_torch_order(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (number, config) in given.value::<Vec<TorchOrder>>("configs")?.iter().enumerate() {
        tch::manual_seed(number as i64);
        let loader = config.loader(number % 3)?;
        for epoch in 0..3 {
            let (mut order, mut sizes, mut drawn) = (Vec::new(), Vec::new(), Vec::new());
            for batch in &loader {
                let batch = batch?;
                sizes.push(batch.len());
                order.extend(batch);
                drawn.push(uniform(3));
            }
            found.insert(format!("{number}.{epoch}"), &indices(&order));
            found.insert(format!("{number}.{epoch}.sizes"), &indices(&sizes));
            found.insert(format!("{number}.{epoch}.drawn"), &Tensor::cat(&drawn, 0));
        }
        found.insert(format!("{number}.normal"), &Tensor::randn([3], (Kind::Float, Device::Cpu)));
    }
    let (mut generator, sampler) = (Generator::manual_seed(7), RandomSampler::new(20, 0));
    let orders = (0..3).map(|epoch| Ok(indices(&sampler.order_from(epoch, &mut generator)?)));
    found.insert("sampler", &Tensor::stack(&orders.collect::<Result<Vec<_>>>()?, 0));
    tch::manual_seed(5);
    let seed = || Tensor::zeros([1], (Kind::Int64, Device::Cpu)).random_().int64_value(&[0]) as u64;
    let orders = (0..3).map(|_| indices(&RandomSampler::new(20, seed()).torch_order(true).order(0)));
    found.insert("sampler.default", &Tensor::stack(&orders.collect::<Vec<_>>(), 0));

    for (number, lengths) in given.value::<Vec<Vec<f64>>>("splits")?.iter().enumerate() {
        tch::manual_seed(number as i64);
        let lengths = match lengths.iter().sum::<f64>() > 1.5 {
            true => lengths.iter().map(|&length| length as usize).collect(),
            false => split_lengths(10, lengths)?,
        };
        for (name, generator) in [("own", Some(&mut Generator::manual_seed(42))), ("default", None)] {
            let parts = random_split(FnDataset::new(10, Ok), &lengths, generator)?;
            let order = parts.iter().flat_map(|part| (0..part.len()).map(|index| part.get(index)));
            found.insert(format!("split.{number}.{name}"), &indices(&order.collect::<Result<Vec<_>, _>>()?));
            let lens: Vec<_> = parts.iter().map(Dataset::len).collect();
            found.insert(format!("split.{number}.{name}.lens"), &indices(&lens));
        }
        found.insert(format!("split.{number}.drawn"), &uniform(2));
    }

    let mut generator = Generator::manual_seed(9);
    let drawn: Vec<_> = (0..400).map(|_| generator.random() as i64).collect();
    found.insert("random", &Tensor::from_slice(&drawn));
    for high in [1, 10, (1 << 28) - 1, 1 << 28, 1 << 40] {
        found.insert(format!("randint.{high}"), &indices(&generator.randint(high, 50)));
    }
    Ok(found)
}

pub fn collate_stack(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for channels in [1, 3, 4] {
        let images = given.tensor(&format!("images.{channels}"))?;
        let image = |index: i64| -> Result<(Image, i64)> {
            let bytes: Vec<u8> = images.get(index).flatten(0, -1).try_into()?;
            let (height, width) = (images.size()[1] as usize, images.size()[2] as usize);
            Ok((Image::new(bytes, height, width, channels)?, index - 2))
        };
        let samples = (0..images.size()[0]).map(image).collect::<Result<Vec<_>>>()?;
        let (stacked, labels) = Stack.collate(samples)?;
        found.insert(format!("stacked.{channels}"), &stacked);
        found.insert(format!("labels.{channels}"), &labels);
    }
    let packed = PackTokens::new().collate(given.value("sequences")?)?;
    found.insert("input_ids", &packed.input_ids);
    found.insert("position_ids", &packed.position_ids);
    found.insert("cu_seqlens", &packed.cu_seqlens);

    let given = given.tensor("clouds")?.to_kind(Kind::Float);
    let cloud = |index: i64| -> Result<PointCloud> {
        Ok(PointCloud::new(Vec::<f32>::try_from(given.get(index).flatten(0, -1))?, given.size()[2] as usize)?)
    };
    let clouds = (0..given.size()[0]).map(cloud).collect::<Result<Vec<_>>>()?;
    let farthest = clouds.iter().map(|cloud| Ok(indices(&cloud.farthest_from(0, 16)?))).collect::<Result<Vec<_>>>()?;
    found.insert("farthest", &Tensor::stack(&farthest, 0));
    found.insert("clouds", &StackPoints.collate(clouds)?);
    Ok(found)
}

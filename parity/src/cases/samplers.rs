//! Samplers and collation against `torch.utils.data`.

use anyhow::{Context, Result};
use overdrive_dataload::{
    BatchSampler, Collate, DistributedSampler, FixedBatches, Image, PackTokens, PointCloud, RandomSampler, Sampler,
    SequentialSampler, Stack, StackPoints, SubsetRandomSampler, WeightedRandomSampler,
};
use tch::{Kind, Tensor};

use crate::record::{Found, Given};

fn indices(values: &[usize]) -> Tensor {
    Tensor::from_slice(&values.iter().map(|&value| value as i64).collect::<Vec<_>>())
}

/// The indices in rising order.
fn sorted(values: &[usize]) -> Tensor {
    indices(values).sort(0, false).0
}

/// Inserts the share that each number below `of` has in `drawn`, and whether it occurs at all.
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

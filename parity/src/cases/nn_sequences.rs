//! Layers with other inputs than a single tensor.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use overdrive_nn::*;
use tch::Tensor;

use super::nn::{Theirs, form, grads, scored, zero_grad};
use crate::record::{Found, Given};

type Layers = BTreeMap<String, Theirs>;

pub fn embeddings(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let indices = given.tensor("indices")?;
    for (name, theirs) in given.value::<Layers>("layers")? {
        tch::manual_seed(7);
        let table = Embedding::builder(7, 4);
        let module = match name.as_str() {
            "embedding" => Embedding::new(7, 4)?,
            "padding_idx" => table.padding_idx(2).build()?,
            "padding_idx_from_the_end" => table.padding_idx(-1).build()?,
            "scale_grad_by_freq" => table.scale_grad_by_freq(true).build()?,
            "sparse" => table.sparse(true).build()?,
            _ => bail!("there is no table {name}"),
        };
        form(&mut found, &name, &module, &theirs)?;
        let y = module.forward(&indices)?;
        found.insert(&name, &y);
        scored(&y).backward();
        let grad = module.weight.grad();
        found.insert(format!("{name}.grad"), &if grad.is_sparse() { grad.to_dense(None, false) } else { grad });
    }
    Ok(found)
}

pub fn bilinear(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, theirs) in given.value::<Layers>("layers")? {
        tch::manual_seed(7);
        let module = Bilinear::new(3, 4, 5, name == "bilinear")?;
        form(&mut found, &name, &module, &theirs)?;
        let input = |which| Ok::<_, anyhow::Error>(given.tensor(&format!("{name}.{which}"))?.set_requires_grad(true));
        let (a, b) = (input("a")?, input("b")?);
        let y = module.forward(&a, &b)?;
        found.insert(&name, &y);
        scored(&y).backward();
        found.insert(format!("{name}.grad_of_a"), &a.grad());
        found.insert(format!("{name}.grad_of_b"), &b.grad());
        grads(&mut found, &name, &module);
    }
    Ok(found)
}

pub fn recurrent(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, theirs) in given.value::<Layers>("layers")? {
        tch::manual_seed(7);
        let (lstm, gru) = (Lstm::builder(5, 6), Gru::builder(5, 6));
        match name.as_str() {
            "lstm" => lstm_passes(&mut found, given, &name, &Lstm::new(5, 6)?, &theirs)?,
            "lstm_deep" => {
                let module = lstm.num_layers(2).dropout(0.3).batch_first(true).lstm()?;
                lstm_passes(&mut found, given, &name, &module, &theirs)?;
            }
            "lstm_both_ways" => {
                let module = lstm.num_layers(2).bidirectional(true).bias(false).lstm()?;
                lstm_passes(&mut found, given, &name, &module, &theirs)?;
            }
            "gru" => gru_passes(&mut found, given, &name, &Gru::new(5, 6)?, &theirs)?,
            "gru_deep" => {
                let module = gru.num_layers(2).dropout(0.3).batch_first(true).bidirectional(true).gru()?;
                gru_passes(&mut found, given, &name, &module, &theirs)?;
            }
            "gru_without_bias" => gru_passes(&mut found, given, &name, &gru.bias(false).gru()?, &theirs)?,
            _ => bail!("there is no layer {name}"),
        }
    }
    Ok(found)
}

fn lstm_passes(found: &mut Found, given: &Given<'_>, name: &str, module: &Lstm, theirs: &Theirs) -> Result<()> {
    passes(found, given, name, module, theirs, |x, state| {
        let (y, (h, c)) = module.forward(x, state)?;
        Ok((y, vec![h, c]))
    })
}

fn gru_passes(found: &mut Found, given: &Given<'_>, name: &str, module: &Gru, theirs: &Theirs) -> Result<()> {
    passes(found, given, name, module, theirs, |x, state| {
        let (y, h) = module.forward(x, state.map(|(h, _)| h))?;
        Ok((y, vec![h]))
    })
}

fn passes<M: Module>(
    found: &mut Found,
    given: &Given<'_>,
    name: &str,
    module: &M,
    theirs: &Theirs,
    forward: impl Fn(&Tensor, Option<(&Tensor, &Tensor)>) -> Result<(Tensor, Vec<Tensor>)>,
) -> Result<()> {
    form(found, name, module, theirs)?;
    let (h, c) = (given.tensor(&format!("{name}.h"))?, given.tensor(&format!("{name}.c"))?);
    for start in ["zeros", "state", "unbatched"] {
        let x = given.tensor(&format!("{name}.{start}.x"))?;
        for mode in ["train", "eval"] {
            module.set_training(mode == "train");
            zero_grad(module);
            let own = x.copy().set_requires_grad(true);
            tch::manual_seed(11);
            let (y, last) = forward(&own, (start == "state").then_some((&h, &c)))?;
            let key = format!("{name}.{start}.{mode}");
            found.insert(&key, &y);
            for (number, each) in last.iter().enumerate() {
                found.insert(format!("{key}.last.{number}"), each);
            }
            scored(&y).backward();
            found.insert(format!("{key}.grad_of_x"), &own.grad());
            grads(found, &key, module);
        }
    }
    Ok(())
}

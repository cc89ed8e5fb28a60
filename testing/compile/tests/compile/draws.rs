//! Random numbers in compiled steps: those of uncompiled ones.

use overdrive_compile as compile;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::beside::strict;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The draws of one step, none of which needs another one: a compiler may compute them in any order. The one for noise is
/// used for nothing, and moves the generator all the same.
fn draw(inputs: &[Tensor]) -> Vec<Tensor> {
    let x = &inputs[0];
    let dropped = x.dropout(0.3, true);
    let channels = x.view([2, 4, 4, 4]).feature_dropout(0.4, true);
    let alpha = x.alpha_dropout(0.3, true);
    let (late, early) = (x.rand_like(), x.rand_like());
    let scaled = late * (early * x).sum(Kind::Float);
    let normal = x.empty_like().normal_(1.0, 2.0);
    let _noise = x.randn_like();
    vec![dropped, channels, alpha, scaled, normal, x.bernoulli_p(0.5)]
}

#[test]
fn independent_draws_keep_their_order() {
    let Some(_alone) = crate::compiling() else { return };
    let vars = VarStore::new(Device::Cpu);
    let _weight = vars.root().ones("weight", &[2]);
    let mut forward = compile::forward(&vars, |inputs| Ok(draw(inputs))).options(strict());
    for call in 0..4 {
        tch::manual_seed(call);
        let x = Tensor::randn([8, 16], FLOAT);
        let then = tch::no_grad(|| (draw(&[x.shallow_clone()]), Tensor::rand([3], FLOAT)));
        tch::manual_seed(call);
        let x = Tensor::randn([8, 16], FLOAT);
        let found = (forward.run(&[x]).unwrap(), Tensor::rand([3], FLOAT));
        for (place, (found, expected)) in found.0.iter().zip(&then.0).enumerate() {
            assert!(found.allclose(expected, 1e-5, 1e-6, false), "call {call}, draw {place}");
        }
        assert_eq!(found.1, then.1, "what is drawn after call {call}");
    }
}

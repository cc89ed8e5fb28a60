use overdrive::core::Module;
use overdrive_compile as compile;
use overdrive_compile::Options;
use tch::Tensor;

use crate::losses::{batch, mlp};

#[test]
fn forward_passes_follow_plain_ones_in_both_modes_and_after_new_weights() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    model.eval();
    let options = Options { strict: true, ..Options::default() };
    let mut compiled = compile::forward(&model, |inputs| Ok(vec![model.forward(&inputs[0])?])).options(options);
    let mut check = |seed| {
        let [x, _] = batch(seed);
        tch::manual_seed(seed);
        let expected = tch::no_grad(|| model.forward(&x).unwrap());
        tch::manual_seed(seed);
        let found = compiled.run(&[x]).unwrap();
        assert!(found[0].allclose(&expected, 1e-5, 1e-6, false), "seed {seed}");
        assert!(!found[0].requires_grad());
        expected
    };
    let before = (0..4).map(&mut check).last();
    for parameter in model.named_parameters() {
        tch::no_grad(|| drop(parameter.tensor().shallow_clone().f_mul_scalar_(0.5).unwrap()));
    }
    let after = check(3);
    assert_ne!(before, Some(after), "the weights are inputs");
    model.train();
    let modes: Vec<Tensor> = (4..7).map(check).collect();
    assert_eq!(modes.len(), 3);
}

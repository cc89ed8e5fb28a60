//! Tables of models.

use std::cell::Cell;

use overdrive_nn::*;
use tch::{Device, Kind, Tensor};

fn x(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

fn has_grad() -> bool {
    (x(&[1]).set_requires_grad(true) * 2.0).requires_grad()
}

#[derive(Debug, Module)]
struct Net {
    features: Sequential,
    norm: BatchNorm1d,
    head: Linear,
    unused: Linear,
}

impl Net {
    fn new() -> Result<Self, NnError> {
        let features = sequential![Linear::new(4, 600)?, Relu, sequential![Linear::new(600, 8)?, Dropout::new(0.9)?]];
        let unused = Linear::new(3, 3)?;
        unused.requires_grad_(false)?;
        Ok(Self { features, norm: BatchNorm1d::new(8)?, head: Linear::new(8, 2)?, unused })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.head.forward(&self.norm.forward(&self.features.forward(x)?)?)
    }
}

#[test]
fn the_table_is_torchinfos() {
    let summary = summary(&Net::new().unwrap(), &x(&[16, 4]), Net::forward).unwrap();
    // As torchinfo 1.8 prints it with row_settings ("depth", "var_names"), but for `unused`, which it leaves out, and
    // the units, which it prints as `Units.KILOBYTES`.
    let expected = "\
===================================================================================================================
Layer (type (var_name):depth-idx)        Output Shape              Param #                   Mult-Adds
===================================================================================================================
Net (Net)                                [16, 2]                   --                        --
├─Sequential (features): 1-1             [16, 8]                   --                        --
│    └─Linear (0): 2-1                   [16, 600]                 3,000                     48,000
│    └─ReLU (1): 2-2                     [16, 600]                 --                        --
│    └─Sequential (2): 2-3               [16, 8]                   --                        --
│    │    └─Linear (0): 3-1              [16, 8]                   4,808                     76,928
│    │    └─Dropout (1): 3-2             [16, 8]                   --                        --
├─BatchNorm1d (norm): 1-2                [16, 8]                   16                        256
├─Linear (head): 1-3                     [16, 2]                   18                        288
├─Linear (unused): 1-4                   --                        (12)                      --
===================================================================================================================
Total params: 7,854
Trainable params: 7,842
Non-trainable params: 12
Total mult-adds (k): 125.47
===================================================================================================================
Input size: 256
Forward/backward pass size (kB): 79.10
Params size (kB): 31.42
Estimated Total Size (kB): 110.78
===================================================================================================================";
    assert_eq!(summary.to_string(), expected);
    let shown = summary.clone().depth(1).to_string();
    assert!(shown.contains(
        "├─Sequential (features): 1-1             [16, 8]                   7,808                     124,928\n"
    ));
    assert!(!shown.contains("2-1"), "{shown}");
    let names: Vec<&str> = summary.rows.iter().map(|row| row.name.as_str()).collect();
    let expected = ["", "features", "features.0", "features.1", "features.2", "features.2.0", "features.2.1", "norm"];
    assert_eq!(names[..8], expected);
}

#[test]
fn multiply_adds_are_those_of_each_output_position() {
    let conv = |x: &Tensor, conv: &Conv2d| summary(conv, x, Conv2d::forward).unwrap().total_mult_adds;
    let layer = Conv2d::builder(4, 6, 3).groups(2).build().unwrap();
    // 108 weights and 6 biases for each of 5 * 7 positions of 3 images.
    assert_eq!(conv(&x(&[3, 4, 7, 9]), &layer), 114 * 35 * 3);
    assert_eq!(conv(&x(&[4, 7, 9]), &layer), 114 * 35);
    let linear = Linear::builder(4, 5).bias(false).build().unwrap();
    assert_eq!(summary(&linear, &x(&[2, 3, 4]), Linear::forward).unwrap().total_mult_adds, 20 * 6);
    assert_eq!(summary(&linear, &x(&[4]), Linear::forward).unwrap().total_mult_adds, 20);
    assert_eq!(summary(&linear, &x(&[0, 4]), Linear::forward).unwrap().total_mult_adds, 0);
}

/// One layer three times: in two fields and called twice by one of them.
#[derive(Debug, Module)]
struct Shared {
    a: std::rc::Rc<Linear>,
    b: std::rc::Rc<Linear>,
    tied: Linear,
}

#[test]
fn shared_modules_and_tied_weights_count_once() {
    let a = std::rc::Rc::new(Linear::new(3, 3).unwrap());
    let mut tied = Linear::builder(3, 3).bias(false).build().unwrap();
    tied.weight = a.weight.tie();
    let model = Shared { b: a.clone(), a, tied };
    let run =
        |model: &Shared, x: &Tensor| model.tied.forward(&model.b.forward(&model.a.forward(&model.a.forward(x)?)?)?);
    let summary = summary(&model, &x(&[2, 3]), run).unwrap();
    assert_eq!((summary.total_params, summary.trainable_params, summary.params_bytes), (12, 12, 48));
    let repeated: Vec<bool> = summary.rows.iter().map(|row| row.is_repeated).collect();
    assert_eq!(repeated, [false, false, true, true]);
    let mult_adds: Vec<u64> = summary.rows.iter().map(|row| row.mult_adds).collect();
    // Three runs of the shared layer, one of the tied one.
    assert_eq!(mult_adds, [0, 3 * 12 * 2, 0, 9 * 2]);
    assert_eq!(summary.to_string().matches("(recursive)").count(), 2);
    assert_eq!(model.named_modules().len(), 3);
    assert_eq!(model.named_parameters().len(), 2);
}

/// Counts its calls in a buffer, which a summary must not keep.
#[derive(Debug, Module)]
struct Counting {
    calls: Buffer,
    dropout: Dropout,
    norm: BatchNorm1d,
    frozen: BatchNorm1d,
}

impl Counting {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let _ = self.calls.shallow_clone().f_add_(&Tensor::ones([1], (Kind::Float, Device::Cpu)))?;
        self.frozen.forward(&self.norm.forward(&self.dropout.forward(x)?)?)
    }
}

#[test]
fn the_model_stays_as_it_is_also_after_an_error_or_a_panic() {
    let model = Counting {
        calls: Buffer::new(&x(&[1])),
        dropout: Dropout::new(0.5).unwrap(),
        norm: BatchNorm1d::new(3).unwrap(),
        frozen: BatchNorm1d::new(3).unwrap(),
    };
    // Its own mode, which differs from the others'.
    model.frozen.eval();
    let before = model.state_dict().unwrap().copied().unwrap();
    let check = |what: &str| {
        for (name, own) in module_entries(&model) {
            assert_eq!(&own, before.tensor(&name, &own.size(), own.kind()).unwrap(), "{name} after {what}");
        }
        let y = model.frozen.forward(&x(&[1, 3])).unwrap();
        assert_eq!(y.size(), [1, 3], "in training mode one row would be refused");
        assert!(model.norm.forward(&x(&[1, 3])).is_err(), "it left training mode after {what}");
        assert!(has_grad());
    };
    let grads = Cell::new(true);
    summary(&model, &x(&[4, 3]), |model, x| {
        grads.set(has_grad());
        assert!(model.norm.forward(&x.narrow(0, 0, 1)).is_ok(), "it is not in evaluation mode");
        model.forward(x)
    })
    .unwrap();
    assert!(!grads.get());
    check("a summary");
    let error = summary(&model, &x(&[4, 5]), Counting::forward).unwrap_err();
    assert!(error.to_string().starts_with("norm: BatchNorm1d(3, eps=1e-05"), "{error}");
    check("an error");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        summary(&model, &x(&[4, 3]), |model, x| -> Result<Tensor, NnError> {
            let _ = model.forward(x)?;
            panic!("in forward")
        })
    }));
    assert!(panicked.is_err());
    check("a panic");
    // Nothing is recorded any more, and a summary within another has its own rows.
    let outer = summary(&model, &x(&[4, 3]), |model, x| {
        assert_eq!(summary(&model.norm, x, BatchNorm1d::forward)?.total_mult_adds, 24);
        model.forward(x)
    });
    assert_eq!(outer.unwrap().total_mult_adds, 48);
}

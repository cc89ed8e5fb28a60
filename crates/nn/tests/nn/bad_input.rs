//! Bad input is an error that names the layer.

use std::rc::Rc;
use std::sync::Arc;

use overdrive_nn::*;
use tch::{Device, Kind, Tensor};

fn x(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

#[derive(Debug, Module)]
struct Net {
    fc1: Linear,
    blocks: Sequential,
}

impl Net {
    fn new() -> Self {
        let inner = sequential![Relu, Linear::new(8, 2).unwrap()];
        Self { fc1: Linear::new(4, 8).unwrap(), blocks: sequential![Conv1d::new(2, 2, 1).unwrap(), inner] }
    }
}

fn text<T>(result: Result<T, NnError>) -> String {
    result.err().expect("bad input was taken").to_string()
}

#[test]
fn errors_name_the_layer_and_its_place() {
    let net = Net::new();
    let check = |result, start: &str, why: &str| {
        let found = text::<Tensor>(result);
        assert!(found.starts_with(start) && found.contains(why), "{found}");
    };
    // Nothing has walked the model yet.
    check(net.fc1.forward(&x(&[2, 5])), "Linear(in_features=4, out_features=8, bias=True): ", "mat1 and mat2");
    let nested = sequential![Relu, sequential![Relu, Linear::new(3, 1).unwrap()]];
    check(nested.forward(&x(&[2, 4])), ".1.1: Linear(in_features=3", "mat1 and mat2");
    check(sequential![Softmax(3)].forward(&x(&[2, 4])), ".0: Softmax(dim=3): ", "Dimension out of range");
    net.train();
    check(net.fc1.forward(&x(&[2, 5])), "fc1: Linear(in_features=4, out_features=8, bias=True): ", "mat1 and mat2");
    check(
        net.blocks.forward(&x(&[2, 2, 5])),
        "blocks.1.1: Linear(in_features=8, out_features=2, bias=True): ",
        "mat1 and mat2",
    );
}

#[test]
fn one_value_a_group_and_a_variance_of_nothing_are_errors() {
    let norm = GroupNorm::new(2, 2).unwrap();
    assert!(text(norm.forward(&x(&[1, 2, 1]))).contains("more than one value per group"));
    assert!(norm.forward(&x(&[2, 2, 1])).is_ok());
    assert!(text(BatchNorm1d::builder(3).eps(0.0).build()).contains("`eps` is 0, but has to be above 0"));
}

#[test]
fn modules_are_not_converted_to_whole_numbers() {
    let linear = Linear::new(2, 2).unwrap();
    linear.requires_grad_(false).unwrap();
    let before = linear.weight.copy();
    let error = linear.to(Kind::Int64).err().unwrap().to_string();
    assert!(error.contains("not to Int64"), "{error}");
    assert_eq!(*linear.weight, before);
}

#[test]
fn every_module_can_be_recognised_in_apply() {
    #[derive(Module)]
    struct All {
        lstm: Lstm,
        gru: Gru,
        list: ModuleList<Linear>,
        one: Rc<Dropout>,
        same: Rc<Dropout>,
    }
    let one = Rc::new(Dropout::new(0.5).unwrap());
    let all = All {
        lstm: Lstm::builder(2, 2).lstm().unwrap(),
        gru: Gru::builder(2, 2).gru().unwrap(),
        list: [Linear::new(2, 2).unwrap()].into_iter().collect(),
        same: one.clone(),
        one,
    };
    let mut seen = [0; 4];
    all.apply(|module| {
        seen[0] += usize::from(module.downcast_ref::<Lstm>().is_some());
        seen[1] += usize::from(module.downcast_ref::<Gru>().is_some());
        seen[2] += usize::from(module.downcast_ref::<ModuleList<Linear>>().is_some());
        // As in PyTorch, a module that its parent has under two names counts once.
        seen[3] += usize::from(module.downcast_ref::<Dropout>().is_some());
        Ok::<_, NnError>(())
    })
    .unwrap();
    assert_eq!(seen, [1; 4]);
}

#[test]
fn wrong_shapes_and_dtypes_of_every_layer_are_an_error() {
    let long = Tensor::ones([2, 4], (Kind::Int64, Device::Cpu));
    let layers: Vec<(Box<dyn Forward>, Vec<Tensor>)> = vec![
        (Box::new(Linear::new(4, 2).unwrap()), vec![x(&[2, 5]), x(&[]), long.shallow_clone()]),
        (Box::new(Conv1d::new(4, 2, 3).unwrap()), vec![x(&[4]), x(&[1, 5, 9]), x(&[1, 4, 2]), long.view([1, 4, 2])]),
        (Box::new(Conv2d::new(4, 2, 3).unwrap()), vec![x(&[4, 4]), x(&[1, 3, 5, 5])]),
        (Box::new(Conv3d::new(4, 2, 3).unwrap()), vec![x(&[4, 4, 4]), x(&[1, 4, 2, 2, 2])]),
        (Box::new(ConvTranspose2d::new(4, 2, 3).unwrap()), vec![x(&[4, 4]), x(&[1, 3, 5, 5])]),
        (Box::new(BatchNorm1d::new(4).unwrap()), vec![x(&[4]), x(&[2, 5]), x(&[2, 4, 3, 3]), x(&[1, 4])]),
        (Box::new(BatchNorm2d::new(4).unwrap()), vec![x(&[2, 4]), x(&[2, 3, 3, 3])]),
        (Box::new(LayerNorm::new(4).unwrap()), vec![x(&[2, 5]), x(&[])]),
        (Box::new(RmsNorm::new(4).unwrap()), vec![x(&[2, 5]), x(&[])]),
        (Box::new(GroupNorm::new(2, 4).unwrap()), vec![x(&[2, 6, 3]), x(&[4])]),
        (Box::new(Embedding::new(4, 2).unwrap()), vec![x(&[2]), &long + 3, &long - 2]),
        (Box::new(MaxPool2d::new(3)), vec![x(&[5, 5]), x(&[1, 2, 2, 2])]),
        (Box::new(AvgPool2d::new(3)), vec![x(&[5, 5]), x(&[1, 2, 2, 2])]),
        (Box::new(AdaptiveAvgPool2d::new(3)), vec![x(&[5])]),
        (Box::new(Flatten::dims(2, 3)), vec![x(&[2, 2])]),
        (Box::new(LogSoftmax(2)), vec![x(&[2, 2])]),
        (Box::new(Prelu::new(3, 0.1).unwrap()), vec![x(&[2, 4])]),
    ];
    for (layer, inputs) in layers {
        for input in inputs.into_iter().chain([Tensor::new()]) {
            let name = layer.describe();
            let shape = if input.defined() { format!("{:?}", input.size()) } else { "undefined".to_owned() };
            match layer.forward(&input) {
                Err(NnError::Forward { layer: named, .. }) => assert_eq!(named, name, "{shape}"),
                other => panic!("{name} of {shape}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_module_of_several_owners_counts_once() {
    #[derive(Debug, Module)]
    struct Owner {
        first: Rc<Linear>,
        second: Rc<Linear>,
        relu: Relu,
        again: Relu,
    }
    let layer = Rc::new(Linear::new(2, 2).unwrap());
    let owner = Owner { first: layer.clone(), second: layer, relu: Relu, again: Relu };
    let names: Vec<String> = owner.named_modules().into_iter().map(|(name, _)| name).collect();
    // Activations are values: each counts.
    assert_eq!(names, ["", "first", "relu", "again"]);
    assert_eq!(owner.num_parameters(), 6);
    let state = owner.state_dict().unwrap();
    assert_eq!(state.len(), 4);
    assert_eq!(owner.first.id(), owner.second.id());
    // A struct begins where its first field does.
    #[derive(Debug, Module)]
    struct Outer(Inner);
    #[derive(Debug, Module)]
    struct Inner(Linear);
    let outer = Outer(Inner(Linear::new(1, 1).unwrap()));
    assert_eq!(outer.named_modules().len(), 3);
}

#[test]
fn options_out_of_range_are_an_error() {
    for error in [
        Linear::new(-1, 2).map(drop),
        Linear::new(2, -1).map(drop),
        Conv2d::new(-3, 8, 3).map(drop),
        Conv2d::new(3, 8, 0).map(drop),
        Conv2d::builder(3, 8, 3).groups(2).build().map(drop),
        Conv2d::builder(4, 8, 3).groups(0).build().map(drop),
        Conv2d::builder(4, 8, 3).stride(0).build().map(drop),
        Conv2d::builder(4, 8, 3).stride(2).padding_same().build().map(drop),
        BatchNorm1d::new(-1).map(drop),
        LayerNorm::new([]).map(drop),
        GroupNorm::new(0, 4).map(drop),
        GroupNorm::new(3, 4).map(drop),
        Embedding::new(-1, 2).map(drop),
        Embedding::builder(3, 2).padding_idx(3).build().map(drop),
        Embedding::builder(3, 2).padding_idx(-4).build().map(drop),
        Dropout::new(1.5).map(drop),
        Dropout::new(-0.1).map(drop),
        Dropout::new(f64::NAN).map(drop),
        Prelu::new(0, 0.1).map(drop),
    ] {
        let Err(NnError::InvalidOption { layer, option, found, expected }) = error else { panic!("{error:?}") };
        assert!(!layer.is_empty() && !option.is_empty() && !found.is_empty() && !expected.is_empty());
    }
    // More memory than there is: libtorch refuses, and does not abort.
    assert!(Linear::new(1 << 40, 1 << 20).is_err());
    assert!(Linear::new(i64::MAX, i64::MAX).is_err());
    assert!(Embedding::new(i64::MAX, 2).is_err());
}

#[test]
fn a_device_or_dtype_that_does_not_exist_is_an_error() {
    let net = Net::new();
    if !tch::Cuda::is_available() {
        assert!(net.to(Device::Cuda(0)).is_err());
        assert_eq!(net.fc1.weight.device(), Device::Cpu);
    }
    assert!(net.to(Device::Cuda(99)).is_err());
    // Parameters have to be floating-point.
    assert!(Parameter::new(&Tensor::ones([2], (Kind::Int64, Device::Cpu))).is_err());
    assert!(net.to(Kind::Int64).is_err());
    assert_eq!(net.fc1.weight.kind(), Kind::Float);
    net.to(Kind::Double).unwrap();
    assert!(text(net.fc1.forward(&x(&[2, 4]))).starts_with("fc1: Linear(in_features=4"));
}

/// With parts as a `visit` written by hand may show them.
struct Odd {
    first: Linear,
    second: Linear,
    in_itself: bool,
}

impl Module for Odd {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        visitor.module("x", &self.first);
        match self.in_itself {
            true => visitor.module("me", self),
            false => visitor.module("x", &self.second),
        }
    }
}

#[test]
fn modules_within_themselves_count_once_and_doubled_names_are_an_error() {
    let odd = |in_itself| Odd { first: Linear::new(1, 1).unwrap(), second: Linear::new(1, 1).unwrap(), in_itself };
    let within = odd(true);
    assert_eq!(within.named_parameters().len(), 2);
    assert_eq!(within.named_modules().len(), 2);
    let mut seen = 0;
    let count = |_: &dyn Module| -> Result<(), NnError> {
        seen += 1;
        Ok(())
    };
    within.apply(count).unwrap();
    assert_eq!(seen, 2);
    let doubled = odd(false);
    let error = module_state(&doubled).unwrap_err().to_string();
    assert_eq!(error, "`x.weight` should be the name of one tensor, but is that of two in this module");
    let state = module_state(&within).unwrap();
    let error = LoadStateDict::new(&state).into(&doubled).unwrap_err().to_string();
    assert!(error.contains("two tensors of the module have the name x.weight."), "{error}");
}

#[test]
fn a_layer_in_several_places_is_one() {
    let shared = Arc::new(Linear::new(2, 2).unwrap());
    let mut model = sequential![shared.clone(), Relu, shared];
    assert_eq!((model.named_parameters().len(), model.state_dict().unwrap().len()), (2, 4));
    let state = model.state_dict().unwrap();
    model.load_state_dict(&state).unwrap();
    assert_eq!(model.forward(&x(&[1, 2])).unwrap().size(), [1, 2]);
}

/// So that a part of a model can be run again by `memory::checkpoint`, on a thread of the GPU's.
#[test]
fn modules_can_be_shared_between_threads() {
    fn is_shared<M: Send + Sync>() {}
    is_shared::<overdrive_nn::Sequential>();
    is_shared::<overdrive_nn::models::Resnet>();
    is_shared::<overdrive_nn::models::Gpt2LmHeadModel>();
    is_shared::<overdrive_nn::Lstm>();
    is_shared::<overdrive_nn::TransformerEncoder>();
}

//! tch's optimizer as an `Optimizer`, and the errors of states that do not fit.

use overdrive_core::{
    Entry, IntoParameters, Module, Optimizer, OptimizerError, OptimizerId, StateDict, StateError, Stateful,
    TchOptimizer, Visitor, base_seed, prefixed, seed_everything,
};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

#[test]
fn tch_optimizers_are_optimizers() {
    let vs = nn::VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[2]);
    let mut tch_opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.5).unwrap());
    let opt: &mut dyn Optimizer = &mut tch_opt;
    assert_eq!(opt.params().len(), 1);
    assert_eq!(opt.lr(0), None, "tch does not expose it");
    weight.sum(Kind::Float).backward();
    opt.step().unwrap();
    assert_eq!(weight.double_value(&[0]), 0.5);
    opt.set_lr(0, 0.25).unwrap();
    opt.step().unwrap();
    assert_eq!(weight.double_value(&[0]), 0.25);
    opt.zero_grad().unwrap();
    opt.step().unwrap();
    assert_eq!(weight.double_value(&[0]), 0.25);

    assert!(matches!(opt.set_lr(1, 0.1), Err(OptimizerError::NoSuchGroup { group: 1, groups: 1 })));
    assert!(opt.set_lr(0, -1.0).is_err());
    assert!(!opt.takes_grad_scale());
}

#[test]
fn ids_tell_optimizers_apart() {
    assert_ne!(OptimizerId::new(), OptimizerId::new());
    let build = || {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = vs.root().ones("weight", &[2]);
        TchOptimizer::new(nn::Sgd::default().build(&vs, 0.5).unwrap())
    };
    let (one, other) = (build(), build());
    assert_ne!(one.id(), other.id());
    assert_eq!(one.id(), one.id());
}

/// A module with one parameter.
struct Holds(Tensor);

impl Module for Holds {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        visitor.parameter("weight", &self.0);
    }
}

#[test]
fn modules_convert_floating_point_and_complex_tensors() {
    let cases = [
        (Kind::Float, Kind::Double, Kind::Double),
        (Kind::Float, Kind::ComplexFloat, Kind::ComplexFloat),
        (Kind::ComplexFloat, Kind::ComplexDouble, Kind::ComplexDouble),
        (Kind::Int64, Kind::Double, Kind::Int64),
    ];
    for (from, to, expected) in cases {
        let module = Holds(Tensor::ones([2], (from, Device::Cpu)));
        module.to(to).unwrap();
        assert_eq!(module.0.kind(), expected, "{from:?} to {to:?}");
    }
}

#[test]
fn states_nest_and_say_what_does_not_fit() {
    let mut inner = StateDict::new();
    inner.insert("weight", Entry::Tensor(Tensor::ones([2, 3], (Kind::Float, Device::Cpu))));
    inner.insert("step", Entry::Int(7));
    let mut state = StateDict::new();
    state.insert_nested("model", inner);
    state.insert("modelling", Entry::Bool(true));
    assert_eq!(state.len(), 3);

    let model = state.nested("model");
    assert_eq!(model.len(), 2, "only entries whose names begin with `model.`");
    assert_eq!(model.int("step").unwrap(), 7);
    assert_eq!(model.float("step").unwrap(), 7.0);
    model.tensor("weight", &[2, 3], Kind::Float).unwrap();

    let error = model.tensor("weight", &[3, 2], Kind::Float).unwrap_err().to_string();
    assert_eq!(error, "`weight` should be a Float tensor of shape [3, 2], but is a Float tensor of shape [2, 3]");
    assert!(matches!(model.tensor("weight", &[2, 3], Kind::Half), Err(StateError::Mismatch { .. })));
    let mut hollow = StateDict::new();
    hollow.insert("weight", Entry::Tensor(Tensor::new()));
    let error = hollow.tensor("weight", &[2, 3], Kind::Float).unwrap_err().to_string();
    assert!(error.ends_with("but is an undefined tensor"), "{error}");
    assert!(matches!(model.bool("step"), Err(StateError::Mismatch { .. })));
    assert!(matches!(model.get("bias"), Err(StateError::Missing { .. })));
    assert!(matches!(model.refuse_unknown(&["weight"]), Err(StateError::Unexpected { key }) if key == "step"));
}

#[test]
fn a_var_store_loads_into_its_own_tensors_or_not_at_all() {
    let build = |value| {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = vs.root().var("a", &[2], nn::Init::Const(value));
        let _ = (vs.root() / "norm").zeros_no_train("mean", &[3]);
        vs
    };
    let (saved, mut vs) = (build(1.0), build(0.0));
    let weight = vs.trainable_variables().remove(0);
    let state = saved.state_dict().unwrap();
    assert_eq!(state.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "norm.mean"]);
    vs.load_state_dict(&state).unwrap();
    assert_eq!(weight.double_value(&[1]), 1.0);
    assert!(weight.requires_grad() && weight.is_leaf());

    let mut other = StateDict::new();
    other.insert("a", Entry::Tensor(Tensor::zeros([2], (Kind::Float, Device::Cpu))));
    assert!(matches!(vs.load_state_dict(&other), Err(StateError::Missing { key }) if key == "norm.mean"));
    other.insert("norm.mean", Entry::Tensor(Tensor::zeros([4], (Kind::Float, Device::Cpu))));
    assert!(matches!(vs.load_state_dict(&other), Err(StateError::Mismatch { key, .. }) if key == "norm.mean"));
    other.insert("norm.mean", Entry::Tensor(Tensor::zeros([3], (Kind::Float, Device::Cpu))));
    other.insert("more", Entry::Int(1));
    assert!(matches!(vs.load_state_dict(&other), Err(StateError::Unexpected { key }) if key == "more"));
    assert_eq!(weight.double_value(&[1]), 1.0);
}

#[test]
fn a_var_store_gives_its_trainable_variables_by_name_in_the_order_they_were_made() {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().var("z", &[2], nn::Init::Const(0.0));
    let _ = (vs.root() / "norm").zeros_no_train("mean", &[3]);
    let _ = (vs.root() / "a").var("empty", &[0, 2], nn::Init::Const(0.0));
    let _ = (vs.root() / "a").var("hollow", &[3, 0], nn::Init::Const(0.0));
    let _ = (vs.root() / "a").var("weight", &[2, 2], nn::Init::Const(1.0));
    let names = |vs: &nn::VarStore| {
        vs.into_parameters().iter().map(|param| param.name().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&vs), ["z", "a.empty", "a.hollow", "a.weight"]);
    vs.freeze();
    assert_eq!(names(&vs).len(), 4, "frozen parameters are parameters");
    let params = prefixed("model", &vs);
    assert_eq!(params[3].name(), Some("model.a.weight"));
    assert_eq!(params[3].tensor().size(), [2, 2]);
    assert_eq!(
        (params[3].label(7), vs.trainable_variables().into_parameters()[3].label(3)),
        ("`model.a.weight`".into(), "number 3".into())
    );
}

#[test]
fn a_boxed_optimizer_steps_and_says_when_its_state_cannot_be_saved() {
    let vs = nn::VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[2]);
    let mut boxed: Box<dyn Optimizer> = Box::new(TchOptimizer::new(nn::Sgd::default().build(&vs, 0.5).unwrap()));
    weight.sum(Kind::Float).backward();
    (&mut *boxed as &mut dyn Optimizer).step().unwrap();
    boxed.step().unwrap();
    assert_eq!(weight.double_value(&[0]), 0.0);
    assert!(matches!(boxed.state_dict(), Err(StateError::NotSaved { .. })));
    assert!(matches!(boxed.load_state_dict(&StateDict::new()), Err(StateError::NotSaved { .. })));
}

#[test]
fn tch_optimizers_free_gradients_that_are_views() {
    let vs = nn::VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[2]);
    let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.5).unwrap());
    weight.sum(Kind::Float).backward();
    opt.zero_grad().unwrap();
    assert!(!weight.grad().defined());
}

#[test]
fn one_seed_reaches_libtorch_and_parts_without_a_seed() {
    let options = (Kind::Float, Device::Cpu);
    assert_eq!(seed_everything(1 << 40 | 3), 1 << 40 | 3);
    assert_eq!(base_seed(), 1 << 40 | 3);
    let first = Tensor::randn([5], options);
    let next = Tensor::randn([5], options);
    assert_ne!(first, next);
    seed_everything(1 << 40 | 3);
    assert_eq!(Tensor::randn([5], options), first);
    tch::manual_seed(1 << 40 | 3);
    assert_eq!(Tensor::randn([5], options), first);
    seed_everything(u64::MAX);
    assert_eq!(base_seed(), u64::MAX);
    if !tch::Cuda::is_available() {
        println!("skipped: no CUDA device");
        return;
    }
    for gpu in 0..tch::Cuda::device_count() as usize {
        let draw = || Tensor::randn([5], (Kind::Float, Device::Cuda(gpu))).to_device(Device::Cpu);
        seed_everything(7);
        let first = draw();
        assert_ne!(draw(), first);
        seed_everything(7);
        assert_eq!(draw(), first);
    }
}

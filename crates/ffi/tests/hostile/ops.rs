//! Operators with invalid arguments that they do not check themselves.

use overdrive_ffi::{Arg, Error, LazyOp, Op, TensorList, Value};
use tch::{Device, Kind, Tensor};

use super::FLOAT;

static ADAMW: LazyOp = LazyOp::new("aten::_fused_adamw_", "");
static SGD: LazyOp = LazyOp::new("aten::_fused_sgd_", "");

struct Lists {
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    averages: Vec<Tensor>,
    largest: Vec<Tensor>,
    steps: Vec<Tensor>,
    found_inf: Option<Tensor>,
}

fn fitting() -> Lists {
    let made = || vec![Tensor::ones([40], FLOAT), Tensor::ones([6, 5], FLOAT)];
    let steps = vec![Tensor::from(1f32), Tensor::from(1f32)];
    Lists { params: made(), grads: made(), averages: made(), largest: Vec::new(), steps, found_inf: None }
}

impl Lists {
    fn adamw(&self, amsgrad: bool) -> Result<(), Error> {
        let copy = |tensor: &Tensor| if tensor.defined() { tensor.copy() } else { Tensor::new() };
        let squares: Vec<_> = self.averages.iter().map(copy).collect();
        let [params, grads, averages, squares, largest, steps] =
            [&self.params, &self.grads, &self.averages, &squares, &self.largest, &self.steps]
                .map(|list| TensorList::new(list).unwrap());
        let lists = [&params, &grads, &averages, &squares, &largest, &steps].map(Arg::TensorList);
        let numbers = [0.1, 0.9, 0.99, 0.0, 1e-8].map(Arg::Double);
        let flags = [Arg::Bool(amsgrad), Arg::Bool(false), Arg::None, self.found_inf.as_ref().into()];
        let args: Vec<_> = lists.into_iter().chain(numbers).chain(flags).collect();
        ADAMW.call(&args).map(drop)
    }

    fn sgd(&self, momentum: f64) -> Result<(), Error> {
        let [params, grads, buffers] =
            [&self.params, &self.grads, &self.averages].map(|list| TensorList::new(list).unwrap());
        let lists = [&params, &grads, &buffers].map(Arg::TensorList);
        let numbers = [0.0, momentum, 0.1, 0.0].map(Arg::Double);
        let flags = [false, false, false].map(Arg::Bool);
        let args: Vec<_> = lists.into_iter().chain(numbers).chain(flags).collect();
        SGD.call(&args).map(drop)
    }
}

#[test]
fn fused_optimizers_refuse_lists_that_do_not_match() {
    fitting().adamw(false).unwrap();
    fitting().sgd(0.9).unwrap();
    type Change = fn(&mut Lists, Tensor);
    type Make = fn() -> Tensor;
    let places: [(&str, Change); 3] = [
        ("params", |lists, tensor| lists.params[0] = tensor),
        ("grads", |lists, tensor| lists.grads[0] = tensor),
        ("averages", |lists, tensor| lists.averages[0] = tensor),
    ];
    let wrong: [(&str, Make); 6] = [
        ("short", || Tensor::ones([3], FLOAT)),
        ("spread", || Tensor::ones([1], FLOAT).expand([40], false)),
        ("double", || Tensor::ones([40], (Kind::Double, Device::Cpu))),
        ("sparse", || Tensor::ones([40], FLOAT).to_sparse_sparse_dim(1)),
        ("strided", || Tensor::ones([80], FLOAT).slice(0, 0, 80, 2)),
        ("undefined", Tensor::new),
    ];
    for (place, change) in places {
        for (what, make) in wrong {
            let mut lists = fitting();
            change(&mut lists, make());
            assert!(lists.adamw(false).is_err(), "{what} {place}");
            assert!(lists.sgd(0.9).is_err(), "{what} {place}");
            assert_eq!(lists.params[1].double_value(&[0, 0]), 1.0, "nothing is stepped: {what} {place}");
        }
    }
    // The same size with different strides: the kernels access both by one index.
    let mut lists = fitting();
    lists.grads[1] = Tensor::ones([5, 6], FLOAT).tr();
    assert!(lists.adamw(false).is_err());
    for remove in [|lists: &mut Lists| drop(lists.grads.pop()), |lists: &mut Lists| drop(lists.averages.pop())] {
        let mut lists = fitting();
        remove(&mut lists);
        assert!(lists.adamw(false).is_err() && lists.sgd(0.9).is_err());
    }
    let mut lists = fitting();
    lists.steps[1] = Tensor::ones([0], FLOAT);
    assert!(lists.adamw(false).is_err());
    lists = fitting();
    lists.steps.pop();
    assert!(lists.adamw(false).is_err());
    assert!(fitting().adamw(true).is_err(), "amsgrad needs the largest");
    for found_inf in [Tensor::ones([0], FLOAT), Tensor::new(), Tensor::ones([1], (Kind::Double, Device::Cpu))] {
        let lists = Lists { found_inf: Some(found_inf), ..fitting() };
        assert!(lists.adamw(false).is_err());
    }
}

#[test]
fn an_operator_outside_the_tables_is_refused() {
    // With lists of different lengths it reads past the end of one.
    let refused = Op::find("aten::_foreach_copy", "").unwrap_err();
    assert!(refused.message().contains("aten::_foreach_copy"), "{refused}");
    let full_like = Op::find("aten::full_like", "").unwrap();
    let x = Tensor::ones([2], FLOAT);
    for dtype in [-1, 127, 1000, 1 << 32 | 6, i64::MAX] {
        let refused = full_like.call(&[Arg::Tensor(&x), Arg::Double(1.0), Arg::Int(dtype)]).unwrap_err();
        assert!(refused.message().contains("dtype"), "{dtype}: {refused}");
    }
    let double = full_like.call(&[Arg::Tensor(&x), Arg::Double(1.0), Arg::Int(7)]).unwrap();
    assert!(matches!(&double[..], [Value::Tensor(made)] if made.kind() == Kind::Double));
    let undefined = full_like.call(&[Arg::Tensor(&Tensor::new()), Arg::Double(1.0)]).unwrap_err();
    assert!(undefined.message().contains("undefined"), "{undefined}");
}

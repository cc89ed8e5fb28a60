//! The step in libtorch operators, for devices that the kernel is not for. The averages are the kernel's bit for bit.

use overdrive_core::TorchError;
use overdrive_ffi::adamw8bit::{self, BLOCK, dynamic_map};
use overdrive_ffi::{Arg, DeviceConstants, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static CLAMP_MIN: LazyOp = LazyOp::new("aten::clamp_min", "");
static BUCKETIZE: LazyOp = LazyOp::new("aten::bucketize", "Tensor");
static NAN_TO_NUM: LazyOp = LazyOp::new("aten::nan_to_num", "");
static FOREACH_COPY: LazyOp = LazyOp::new("aten::_foreach_copy_", "");

/// A parameter, its gradient, and the codes and scales of both averages.
pub(super) struct Quantised {
    pub(super) param: Tensor,
    pub(super) grad: Tensor,
    pub(super) averages: [(Tensor, Tensor); 2],
}

impl Quantised {
    pub(super) fn state(&self) -> adamw8bit::State<'_> {
        let [(codes1, scales1), (codes2, scales2)] = &self.averages;
        adamw8bit::State { codes1, scales1, codes2, scales2 }
    }

    fn numbers(&self) -> i64 {
        self.param.numel() as i64
    }

    fn blocks(&self) -> i64 {
        super::blocks(&self.param)
    }

    /// The numbers of a tensor like the parameter, in memory order.
    fn flat(&self, tensor: &Tensor) -> Result<Tensor, TorchError> {
        Ok(tensor.f_detach()?.f_as_strided([self.numbers()], [1], None::<i64>)?)
    }
}

/// The 256 numbers that the byte codes stand for, the midpoints between them, and a block of the code of 0.
struct Map {
    codes: Tensor,
    middles: Tensor,
    zeros: Tensor,
}

/// The maps of the first and the second average.
fn maps(device: Device) -> Result<[Map; 2], TorchError> {
    static MAPS: DeviceConstants<6> = DeviceConstants::new();
    let make = || {
        let [signed, unsigned] = [true, false].map(dynamic_map);
        let tensor = |numbers: &[f32]| Tensor::f_from_slice(numbers);
        let middles =
            |codes: &[f32]| tensor(&codes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect::<Vec<_>>());
        let zeros = |codes: &[f32]| {
            let zero = codes.iter().position(|&number| number == 0.0).unwrap_or(0) as i64;
            Tensor::f_full([BLOCK], zero, (Kind::Uint8, Device::Cpu))
        };
        let of = |codes: &[f32]| Ok::<_, TorchError>([tensor(codes)?, middles(codes)?, zeros(codes)?]);
        let ([codes1, middles1, zeros1], [codes2, middles2, zeros2]) = (of(&signed)?, of(&unsigned)?);
        Ok::<_, TorchError>([codes1, middles1, zeros1, codes2, middles2, zeros2])
    };
    let [codes1, middles1, zeros1, codes2, middles2, zeros2] = MAPS.on(device, make)?;
    let first = Map { codes: codes1, middles: middles1, zeros: zeros1 };
    Ok([first, Map { codes: codes2, middles: middles2, zeros: zeros2 }])
}

/// One tensor of each parameter, one behind the other: `[blocks, 256]`. Each begins a block; `filling` fills the last one.
fn in_blocks(all: &[Quantised], tensors: Vec<Tensor>, filling: &Tensor) -> Result<Tensor, TorchError> {
    let mut parts = Vec::new();
    for (one, tensor) in all.iter().zip(tensors) {
        parts.push(tensor);
        let missing = one.blocks() * BLOCK - one.numbers();
        if missing > 0 {
            parts.push(filling.f_narrow(0, 0, missing)?);
        }
    }
    Ok(Tensor::f_cat(&parts, 0)?.f_view([-1, BLOCK])?)
}

/// Writes to each parameter's tensor what [`in_blocks`] has laid one behind the other, or with `lengths` of its own.
fn write_back(source: &Tensor, lengths: impl Iterator<Item = (i64, i64)>, to: &[Tensor]) -> Result<(), TorchError> {
    let source = source.f_view([-1])?;
    let mut begin = 0;
    let mut parts = Vec::new();
    for (length, room) in lengths {
        parts.push(source.f_narrow(0, begin, length)?);
        begin += room;
    }
    let (to, parts) = (TensorList::new(to)?, TensorList::new(&parts)?);
    FOREACH_COPY.call(&[Arg::TensorList(&to), Arg::TensorList(&parts), Arg::Bool(false)])?;
    Ok(())
}

fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor, TorchError> {
    MUL.tensor(&[Arg::Tensor(tensor), Arg::Double(factor)])
}

/// Steps parameters of one device and dtype, all at the same number of steps.
pub(super) fn by_operators(all: &[Quantised], o: &adamw8bit::Options) -> Result<(), TorchError> {
    let Some(Quantised { param, grad, .. }) = all.first() else { return Ok(()) };
    let (device, kinds) = (param.device(), [param.kind(), grad.kind()]);
    let maps = maps(device)?;
    let laid = |of: fn(&Quantised) -> &Tensor, kind| {
        let flat = all.iter().map(|one| one.flat(of(one))).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, TorchError>(in_blocks(all, flat, &Tensor::f_zeros([BLOCK], (kind, device))?)?.f_to_kind(Kind::Float)?)
    };
    let grad = laid(|one| &one.grad, kinds[1])?;
    let grad = if o.maximize { grad.f_neg()? } else { grad };
    let average = |index: usize| {
        let map = &maps[index];
        let codes = all.iter().map(|one| one.averages[index].0.shallow_clone()).collect();
        let scales: Vec<&Tensor> = all.iter().map(|one| &one.averages[index].1).collect();
        let codes = in_blocks(all, codes, &map.zeros)?.f_view([-1])?.f_to_kind(Kind::Int)?;
        let numbers = map.codes.f_index_select(0, &codes)?.f_view([-1, BLOCK])?;
        Ok::<_, TorchError>(numbers.f_mul(&Tensor::f_cat(&scales, 0)?.f_unsqueeze(1)?)?)
    };
    let average1 = scaled(&average(0)?, o.betas.0)?.f_add(&scaled(&grad, 1.0 - o.betas.0)?)?;
    let average2 = scaled(&average(1)?, o.betas.1)?.f_add(&scaled(&grad, 1.0 - o.betas.1)?.f_mul(&grad)?)?;

    let root = (1.0 - o.betas.1.powf(o.step)).sqrt();
    let denominator = DIV.tensor(&[Arg::Tensor(&average2.f_sqrt()?), Arg::Double(root)])?;
    let update = average1.f_div(&ADD.tensor(&[Arg::Tensor(&denominator), Arg::Double(o.eps)])?)?;
    let update = scaled(&update, -o.lr / (1.0 - o.betas.0.powf(o.step)))?;
    let own = laid(|one| &one.param, kinds[0])?;
    let stepped = scaled(&own, 1.0 - o.lr * o.weight_decay)?.f_add(&update)?.f_to_kind(kinds[0])?;
    let params = all.iter().map(|one| one.flat(&one.param)).collect::<Result<Vec<_>, _>>()?;
    write_back(&stepped, all.iter().map(|one| (one.numbers(), one.blocks() * BLOCK)), &params)?;
    for (index, average) in [average1, average2].iter().enumerate() {
        let (codes, scales) = quantised(average, &maps[index])?;
        let own = |of: fn(&(Tensor, Tensor)) -> &Tensor| -> Vec<Tensor> {
            all.iter().map(|one| of(&one.averages[index]).shallow_clone()).collect()
        };
        write_back(&codes, all.iter().map(|one| (one.numbers(), one.blocks() * BLOCK)), &own(|it| &it.0))?;
        write_back(&scales, all.iter().map(|one| (one.blocks(), one.blocks())), &own(|it| &it.1))?;
    }
    Ok(())
}

/// The nearest code of each element, and the largest absolute value of each row as its scale.
fn quantised(rows: &Tensor, map: &Map) -> Result<(Tensor, Tensor), TorchError> {
    let largest = rows.f_abs()?.f_amax([1], true)?;
    // Infinity - infinity is NaN: values that are not finite have no code, so the scale marks the whole block as NaN.
    let scale = largest.f_add(&largest.f_sub(&largest)?)?;
    let divisor = CLAMP_MIN.tensor(&[Arg::Tensor(&largest), Arg::Double(f64::from(f32::MIN_POSITIVE))])?;
    let relative = rows.f_div(&divisor)?;
    let zero = [Arg::Tensor(&relative), Arg::Double(0.0), Arg::Double(0.0), Arg::Double(0.0)];
    let places =
        BUCKETIZE.tensor(&[Arg::Tensor(&NAN_TO_NUM.tensor(&zero)?), Arg::Tensor(&map.middles), Arg::Bool(true)])?;
    Ok((places.f_to_kind(Kind::Uint8)?, scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [i64; 4] = [1, 255, 256, 1000];

    fn fresh(kind: Kind) -> Vec<Quantised> {
        let one = |n: i64| {
            let codes = || Tensor::zeros([n], (Kind::Uint8, Device::Cpu));
            let scales = || Tensor::zeros([(n + BLOCK - 1) / BLOCK], (Kind::Float, Device::Cpu));
            let param = (Tensor::arange(n, (Kind::Float, Device::Cpu)) * 0.37).sin().to_kind(kind);
            let averages = [(codes(), scales()), (codes(), scales())];
            Quantised { grad: param.zeros_like(), param, averages }
        };
        SIZES.map(one).into()
    }

    fn set_grads(all: &mut [Quantised], grad: impl Fn(i64) -> Tensor) {
        for one in all {
            one.grad = grad(one.numbers()).to_kind(one.param.kind());
        }
    }

    fn by_kernel(all: &[Quantised], options: &adamw8bit::Options) {
        for one in all {
            adamw8bit::step(&one.param, &one.grad, one.state(), options).unwrap();
        }
    }

    /// Eight steps with each, on parameters whose last block is often short: each alone, and all at once.
    #[test]
    fn the_kernel_and_the_operators_compute_the_same() {
        for (kind, rounding) in [(Kind::Float, 1e-6), (Kind::BFloat16, 1e-2), (Kind::Half, 1e-3)] {
            for together in [true, false] {
                let (mut kernel, mut operators) = (fresh(kind), fresh(kind));
                for step in 1..9 {
                    let grad = |n| (Tensor::arange(n, (Kind::Float, Device::Cpu)) * f64::from(step)).cos();
                    let grad = |n| grad(n).pow_tensor_scalar(5);
                    let (lr, betas, eps, weight_decay) = (0.01, (0.9, 0.99), 1e-8, 0.1);
                    let maximize = step == 5;
                    let options = adamw8bit::Options { lr, betas, eps, weight_decay, step: step.into(), maximize };
                    set_grads(&mut kernel, grad);
                    set_grads(&mut operators, grad);
                    by_kernel(&kernel, &options);
                    match together {
                        true => by_operators(&operators, &options).unwrap(),
                        false => operators.chunks(1).for_each(|one| by_operators(one, &options).unwrap()),
                    }
                    for (kernel, operators) in kernel.iter().zip(&operators) {
                        // libtorch's square root sometimes differs in the last bit.
                        let [one, other] = [kernel, operators].map(|it| it.param.to_kind(Kind::Float));
                        assert!(one.allclose(&other, rounding, 1e-7, false), "{kind:?}, {step}");
                        for (one, other) in kernel.averages.iter().zip(&operators.averages) {
                            assert!(one.0.equal(&other.0) && one.1.equal(&other.1), "{kind:?}, step {step}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_infinite_gradient_spoils_its_block_in_both() {
        let (mut kernel, mut operators) = (fresh(Kind::Float), fresh(Kind::Float));
        let grad = |n| {
            let grad = Tensor::ones([n], (Kind::Float, Device::Cpu));
            let _ = grad.get(0).fill_(f64::INFINITY);
            grad
        };
        set_grads(&mut kernel, grad);
        set_grads(&mut operators, grad);
        let (betas, eps) = ((0.9, 0.99), 1e-8);
        let options = adamw8bit::Options { lr: 0.0, betas, eps, weight_decay: 0.0, step: 1.0, maximize: false };
        by_kernel(&kernel, &options);
        by_operators(&operators, &options).unwrap();
        for (kernel, operators) in kernel.iter().zip(&operators) {
            for (one, other) in kernel.averages.iter().zip(&operators.averages) {
                assert!(one.1.isnan().equal(&other.1.isnan()) && one.1.get(0).double_value(&[]).is_nan());
                assert!(one.0.equal(&other.0));
                assert!(one.1.nan_to_num(0.0, 0.0, 0.0).equal(&other.1.nan_to_num(0.0, 0.0, 0.0)));
            }
        }
    }
}

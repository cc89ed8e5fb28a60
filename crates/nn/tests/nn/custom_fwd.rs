//! Functions under autocast.

use overdrive_ffi::autocast::{Region, State};
use overdrive_nn::autograd::{BackwardContext, BoxError, Context, CustomFwd, Function, grad};
use tch::{Device, Kind, Tensor};

use super::function::list;

/// A matrix product under autocast.
struct Product<const CAST: bool>;

impl<const CAST: bool> Function for Product<CAST> {
    type Inputs = [Tensor; 2];
    type Outputs = Tensor;

    const CUSTOM_FWD: Option<CustomFwd> = Some(match CAST {
        true => CustomFwd::new(Device::Cpu).cast_inputs(Kind::Float),
        false => CustomFwd::new(Device::Cpu),
    });

    fn forward(&mut self, ctx: &mut Context, [a, b]: [&Tensor; 2]) -> Result<Tensor, BoxError> {
        // The conversion is not recorded.
        assert!(!CAST || a.kind() != Kind::Float || !a.requires_grad());
        ctx.save_for_backward([a, b]);
        Ok(a.f_matmul(b)?)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<[Option<Tensor>; 2], BoxError> {
        let [a, b] = ctx.saved_tensors()?;
        let gradients = [grad.f_matmul(&b.tr())?, a.tr().f_matmul(&grad)?];
        let expected = if CAST { Kind::Float } else { grad.kind() };
        assert!(gradients.iter().all(|it| it.kind() == expected));
        Ok(gradients.map(Some))
    }
}

#[test]
fn backward_has_the_autocast_state_of_forward() {
    let options = (Kind::Float, Device::Cpu);
    let [a, b] = [0, 1].map(|_| Tensor::rand([3, 3], options).set_requires_grad(true));
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    let half = a.to_kind(Kind::BFloat16);
    let (casting, same, product) = {
        let _region = Region::enter(Device::Cpu, on).unwrap();
        (Product::<true>.apply([&half, &b]), Product::<false>.apply([&a, &b]), a.matmul(&b))
    };
    let (casting, same) = (casting.unwrap(), same.unwrap());
    assert_eq!((casting.kind(), same.kind()), (Kind::Float, Kind::BFloat16));
    assert_eq!(list(&same), list(&product));
    // Outside of the region, the same operators as inside: bfloat16, or float32.
    let [da, db] = grad(&same.sum(Kind::Float), [&a, &b]).run().unwrap();
    let [ea, eb] = grad(&product.sum(Kind::Float), [&a, &b]).run().unwrap();
    assert_eq!([list(&da), list(&db)], [list(&ea), list(&eb)]);
    // Inside of a region, float32 all the same.
    let _region = Region::enter(Device::Cpu, on).unwrap();
    let [_, db] = grad(&casting.sum(Kind::Float), [&a, &b]).run().unwrap();
    assert_eq!(db.kind(), Kind::Float);
    drop(_region);
    // Without autocast, inputs are not converted.
    assert_eq!(Product::<true>.apply([&half, &b.to_kind(Kind::BFloat16)]).unwrap().kind(), Kind::BFloat16);
}

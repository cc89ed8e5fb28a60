//! How bfloat16 and float16 parameters are updated, so that small updates are not lost.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::algorithm::Slot;
use crate::foreach;

static RANDOM: LazyOp = LazyOp::new("aten::random_", "to");
static EMPTY_LIKE: LazyOp = LazyOp::new("aten::empty_like", "");
static AND: LazyOp = LazyOp::new("aten::bitwise_and_", "Scalar");

/// How to apply updates that are too small for a bfloat16 or float16 parameter to represent. float32 and float64
/// parameters are stepped as usual.
///
/// A bfloat16 number has 8 significant bits: updates below 1/512 of a weight are rounded away, however many there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LowPrecision {
    /// Rounds the parameter and the optimizer's averages to the nearest number, like PyTorch.
    #[default]
    Nearest,
    /// Computes the step in float32, with float32 averages, and rounds the parameter up or down at random, so that its
    /// expected value is exact. bfloat16 only; float16 parameters are rounded to the nearest. Uses the random generator
    /// of the device.
    ///
    /// Source: Zamirai et al., "Revisiting BFloat16 Training", 2020.
    StochasticRounding,
    /// Keeps and steps a float32 copy of each parameter (`master_param` in the state), and rounds it into the
    /// parameter. When other code writes to the parameter (loading, an average over ranks, a clamp), the copy takes
    /// over the elements that no longer equal the rounded copy.
    ///
    /// Source: Micikevicius et al., "Mixed Precision Training", 2018.
    MasterCopy,
}

const MASTER: &str = "master_param";

impl LowPrecision {
    /// The form that applies to parameters of this dtype.
    pub(crate) fn of(self, kind: Kind) -> Self {
        match (self, kind) {
            (Self::MasterCopy, Kind::BFloat16 | Kind::Half) | (Self::StochasticRounding, Kind::BFloat16) => self,
            _ => Self::Nearest,
        }
    }

    /// The dtype in which parameters of this one are stepped.
    pub(crate) fn stepped_kind(self, kind: Kind) -> Kind {
        if self.of(kind) == Self::Nearest { kind } else { Kind::Float }
    }

    /// The slot for each parameter, before the algorithm's slots.
    pub(crate) fn slot(self) -> Option<Slot> {
        (self == Self::MasterCopy).then(|| Slot::copy(MASTER))
    }

    /// The parameter as the algorithm sees it.
    pub(crate) fn stepped(self, param: &Tensor) -> Result<Tensor, TorchError> {
        match self {
            Self::Nearest => Ok(param.shallow_clone()),
            Self::StochasticRounding | Self::MasterCopy => Ok(param.f_detach()?.f_to_kind(Kind::Float)?),
        }
    }

    /// Runs `step` on the parameters as the algorithm sees them, and rounds the result into the real ones.
    pub(crate) fn step(
        self,
        params: &TensorList,
        grads: &TensorList,
        slots: &[TensorList],
        step: impl FnOnce(&TensorList, &TensorList, &[TensorList]) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        match self {
            Self::Nearest => step(params, grads, slots),
            Self::MasterCopy => {
                let Some((masters, slots)) = slots.split_first() else { return Ok(()) };
                step(masters, &to_float(grads)?, slots)?;
                foreach::copy_(params, masters)
            }
            Self::StochasticRounding => {
                let exact = to_float(params)?;
                step(&exact, &to_float(grads)?, slots)?;
                let rounded = exact.to_vec()?.iter().map(round_by_chance).collect::<Result<Vec<_>, _>>()?;
                foreach::copy_(params, &TensorList::new(&rounded)?)
            }
        }
    }
}

/// Copies into the masters what other code has written to the parameters. Elements that still equal the rounded master
/// keep their float32 value.
pub(crate) fn follow_written(params: &TensorList, masters: &TensorList) -> Result<(), TorchError> {
    for (param, mut master) in params.to_vec()?.iter().zip(masters.to_vec()?) {
        let is_own = master.f_to_kind(param.kind())?.f_eq_tensor(param)?;
        let followed = master.f_where_self(&is_own, &param.f_to_kind(Kind::Float)?)?;
        master.f_copy_(&followed)?;
    }
    Ok(())
}

fn to_float(list: &TensorList) -> Result<TensorList, TorchError> {
    let tensors = list.to_vec()?;
    let floats =
        tensors.iter().map(|tensor| Ok(tensor.f_to_kind(Kind::Float)?)).collect::<Result<Vec<_>, TorchError>>()?;
    TensorList::new(&floats)
}

/// Rounds each element to one of the two neighbouring bfloat16 numbers, the nearer one with the higher probability. The
/// result is float32.
///
/// A bfloat16 is the upper half of a float32. Adding random bits to the lower half carries into the upper half with a
/// probability proportional to the lower half; then the lower half is cut off.
fn round_by_chance(exact: &Tensor) -> Result<Tensor, TorchError> {
    let bits = exact.f_view_dtype(Kind::Int)?;
    let mut noisy = EMPTY_LIKE.tensor(&[Arg::Tensor(&bits)])?;
    RANDOM.call(&[Arg::Tensor(&noisy), Arg::Int(1 << 16)])?;
    let _ = noisy.f_add_(&bits)?;
    AND.call(&[Arg::Tensor(&noisy), Arg::Int(!0xffff)])?;
    let rounded = noisy.f_view_dtype(Kind::Float)?;
    // Infinities and NaN stay as they are: a carry could change a NaN's sign.
    Ok(rounded.f_where_self(&exact.f_isfinite()?, exact)?)
}

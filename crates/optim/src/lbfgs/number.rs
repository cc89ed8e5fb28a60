//! Numbers that round as in Python, where some are `float` and others tensors without dimensions.

use std::cmp::Ordering;
use std::ops::{Add, Div, Mul, Neg, Sub};

use overdrive_core::TorchError;
use tch::{Device, Kind, Tensor};

/// A number on the host: a Python `float`, or what a tensor without dimensions holds.
///
/// With a float32 tensor, Python rounds the other operand and the result to float32. With both kinds, `float / tensor`
/// multiplies by the tensor's reciprocal. L-BFGS amplifies the last bit, so both are repeated here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number {
    pub value: f64,
    /// The tensor's dtype; none for a `float`.
    kind: Option<Kind>,
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self { value, kind: None }
    }
}

impl Number {
    /// # Syncs
    /// Waits for the tensor's device.
    pub fn read(tensor: &Tensor) -> Result<Self, TorchError> {
        Ok(Self { value: tensor.f_double_value(&[])?, kind: Some(tensor.kind()) })
    }

    /// # Syncs
    /// Waits for the tensors' device, once for both.
    pub fn read_both(one: &Tensor, other: &Tensor) -> Result<[Self; 2], TorchError> {
        let both = Tensor::f_stack(&[one, other], 0)?.f_to_device(Device::Cpu)?;
        let number = |value| Self { value, kind: Some(both.kind()) };
        Ok([number(both.f_double_value(&[0])?), number(both.f_double_value(&[1])?)])
    }

    /// The number that a tensor of this dtype holds.
    pub fn of_kind(value: f64, kind: Kind) -> Self {
        Self { value: round(value, Some(kind)), kind: Some(kind) }
    }

    fn with(self, other: Self, compute: impl FnOnce(f64, f64) -> f64) -> Self {
        let kind = self.kind.or(other.kind);
        Self { value: round(compute(round(self.value, kind), round(other.value, kind)), kind), kind }
    }

    fn reciprocal(self) -> Self {
        Self { value: round(1.0 / self.value, self.kind), ..self }
    }

    pub fn abs(self) -> Self {
        Self { value: self.value.abs(), ..self }
    }

    /// By libtorch, whose roots sometimes differ from the nearest number.
    pub fn sqrt(self) -> Result<Self, TorchError> {
        let tensor = Tensor::f_from_slice(&[self.value])?.f_to_kind(self.kind.unwrap_or(Kind::Double))?;
        Ok(Self { value: tensor.f_sqrt()?.f_double_value(&[0])?, ..self })
    }

    /// Python's `min`: the first of the two unless the second is smaller.
    pub fn min(self, other: impl Into<Self>) -> Self {
        let other = other.into();
        if other < self { other } else { self }
    }

    /// Python's `max`.
    pub fn max(self, other: impl Into<Self>) -> Self {
        let other = other.into();
        if other > self { other } else { self }
    }
}

fn round(value: f64, kind: Option<Kind>) -> f64 {
    if kind == Some(Kind::Float) { f64::from(value as f32) } else { value }
}

macro_rules! operators {
    ($($operator:ident $function:ident $sign:tt;)+) => {$(
        impl<N: Into<Number>> $operator<N> for Number {
            type Output = Self;

            fn $function(self, other: N) -> Self {
                self.with(other.into(), |one, other| one $sign other)
            }
        }

        impl $operator<Number> for f64 {
            type Output = Number;

            fn $function(self, other: Number) -> Number {
                Number::from(self) $sign other
            }
        }
    )+};
}

operators! {
    Add add +;
    Sub sub -;
    Mul mul *;
}

impl<N: Into<Number>> Div<N> for Number {
    type Output = Self;

    fn div(self, other: N) -> Self {
        let other = other.into();
        match (self.kind, other.kind) {
            (None, Some(_)) => other.reciprocal().with(self, |one, other| one * other),
            _ => self.with(other, |one, other| one / other),
        }
    }
}

impl Neg for Number {
    type Output = Self;

    fn neg(self) -> Self {
        Self { value: -self.value, ..self }
    }
}

impl<N: Into<Self> + Copy> PartialEq<N> for Number {
    fn eq(&self, other: &N) -> bool {
        self.partial_cmp(other) == Some(Ordering::Equal)
    }
}

impl<N: Into<Self> + Copy> PartialOrd<N> for Number {
    fn partial_cmp(&self, other: &N) -> Option<Ordering> {
        let other = (*other).into();
        let kind = self.kind.or(other.kind);
        round(self.value, kind).partial_cmp(&round(other.value, kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each result is compared with libtorch's own.
    #[test]
    fn numbers_round_as_tensors_do() {
        for kind in [Kind::Float, Kind::Double] {
            for (one, other) in [(0.1, 0.3), (1e-9, 7.7), (-3.3, 1e8), (2.0, 2.0)] {
                let tensor = Tensor::from(one).to_kind(kind);
                let number = Number::read(&tensor).unwrap();
                let same = |ours: Number, theirs: &Tensor, what: &str| {
                    assert_eq!(ours.value, theirs.double_value(&[]), "{kind:?}: {what} of {one} and {other}");
                };
                same(number + other, &(&tensor + other), "sum");
                same(number - other, &(&tensor - other), "difference");
                same(number * other, &(&tensor * other), "product");
                same(number / other, &(&tensor / other), "quotient");
                same(Number::from(other) / number, &(tensor.reciprocal() * other), "quotient by a tensor");
                same(number.abs().sqrt().unwrap(), &tensor.abs().sqrt(), "root");
                assert_eq!(number < other, tensor.lt(other).int64_value(&[]) == 1, "{one} < {other}");
            }
        }
        let both = Tensor::from_slice(&[0.1, 0.3]).to_kind(Kind::Float).to_device(Device::Cpu);
        let [one, other] = [0, 1].map(|index| both.get(index));
        let [ours, others] = [&one, &other].map(|it| Number::read(it).unwrap());
        assert_eq!((ours / others).value, (one / other).double_value(&[]));
        assert!(ours.min(f64::NAN).value == ours.value && ours.max(others).value == others.value);
    }
}

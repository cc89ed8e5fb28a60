//! The arithmetic of reductions.
//!
//! It follows NCCL's kernels (`reduce_kernel.h`, `hostToDevRedOp`). The result of each operation is rounded to the data
//! type, also to a 16-bit one (`__hadd2`). An average of floating-point numbers multiplies each rank's number by 1 /
//! ranks before the sum; an average of integers divides the sum, and rounds towards 0. Integers wrap.
//!
//! The last bits of floating-point sums are not those of a GPU. Here ranks are added in order from rank 0; NCCL's rings
//! begin at another rank for each part of the data, and NVLink's switches add 16-bit numbers in 32 bits.

use half::{bf16, f16};

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DataType {
    Int8,
    Uint8,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float16,
    Float32,
    Float64,
    Bfloat16,
    Float8E4M3,
    Float8E5M2,
}

const TYPES: [DataType; 12] = {
    use DataType::{
        Bfloat16, Float8E4M3, Float8E5M2, Float16, Float32, Float64, Int8, Int32, Int64, Uint8, Uint32, Uint64,
    };
    [Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16, Float8E4M3, Float8E5M2]
};

impl DataType {
    /// The type with this value in `nccl.h`.
    pub fn new(number: i32) -> Option<Self> {
        TYPES.get(usize::try_from(number).ok()?).copied()
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8E4M3 | Self::Float8E5M2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }

    /// Whether reductions accept it. 8-bit floating-point numbers can only be moved.
    pub fn can_be_reduced(self) -> bool {
        !matches!(self, Self::Float8E4M3 | Self::Float8E5M2)
    }
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    Sum,
    Prod,
    Max,
    Min,
    Average,
    /// The sum, where each rank first multiplies its numbers by a factor of its own, which has the type of the data.
    PreMulSum(Scalar),
}

/// The factor of [`Reduction::PreMulSum`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    Bytes([u8; 8]),
    /// The address at which the host reads it when the collective runs.
    At(usize),
}

impl Reduction {
    /// A number to compare two ranks' reductions by. It leaves the factors out, which may differ between ranks.
    pub fn number(self) -> u8 {
        match self {
            Self::Sum => 0,
            Self::Prod => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Average => 4,
            Self::PreMulSum(_) => 5,
        }
    }

    /// The operator with this value in `nccl.h`.
    pub fn new(number: i32) -> Option<Self> {
        [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Average].get(usize::try_from(number).ok()?).copied()
    }
}

trait Number: Copy {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn add(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    /// 1 / ranks; `None` for integers.
    fn part(ranks: usize) -> Option<Self>;
    fn divided(self, ranks: usize) -> Self;
}

macro_rules! number {
    ($($name:ty: |$a:ident, $b:ident, $n:ident| $add:expr, $times:expr, $larger:expr, $smaller:expr, $part:expr,
        $divided:expr;)+) => {$(
        impl Number for $name {
            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<Self>()];
                own.copy_from_slice(&bytes[..size_of::<Self>()]);
                Self::from_ne_bytes(own)
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn add(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $add
            }
            fn times(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $times
            }
            fn larger(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $larger
            }
            fn smaller(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $smaller
            }
            fn part($n: usize) -> Option<Self> {
                $part
            }
            fn divided(self, $n: usize) -> Self {
                let $a = self;
                $divided
            }
        }
    )+};
}

macro_rules! integers {
    ($($name:ty),+) => {
        // The average is computed in 128 bits, because the number of ranks may not fit the type.
        number! {$($name: |a, b, n| a.wrapping_add(b), a.wrapping_mul(b), a.max(b), a.min(b), {
            let _ = n;
            None
        }, (i128::from(a) / n as i128) as Self;)+}
    };
}

integers!(i8, u8, i32, u32, i64, u64);

// `max` and `min` of a number and a NaN are the number, as in CUDA's `fmaxf`, `fminf`, `__hmax2` and `__hmin2`.
number! {
    f32: |a, b, n| a + b, a * b, a.max(b), a.min(b), Some((1.0 / n as f64) as f32), { let _ = n; a };
    f64: |a, b, n| a + b, a * b, a.max(b), a.min(b), Some(1.0 / n as f64), { let _ = n; a };
    f16: |a, b, n| a + b, a * b, Self::from_f32(a.to_f32().max(b.to_f32())),
        Self::from_f32(a.to_f32().min(b.to_f32())),
        Some(Self::from_f32((1.0 / n as f64) as f32)), { let _ = n; a };
    bf16: |a, b, n| a + b, a * b, Self::from_f32(a.to_f32().max(b.to_f32())),
        Self::from_f32(a.to_f32().min(b.to_f32())),
        Some(Self::from_f32((1.0 / n as f64) as f32)), { let _ = n; a };
}

fn each<T: Number>(bytes: &mut [u8], change: impl Fn(T) -> T) {
    for own in bytes.chunks_exact_mut(size_of::<T>()) {
        change(T::read(own)).write(own);
    }
}

fn both<T: Number>(into: &mut [u8], from: &[u8], change: impl Fn(T, T) -> T) {
    for (own, other) in into.chunks_exact_mut(size_of::<T>()).zip(from.chunks_exact(size_of::<T>())) {
        change(T::read(own), T::read(other)).write(own);
    }
}

fn before_of<T: Number>(reduction: Reduction, bytes: &mut [u8], ranks: usize) {
    let factor = match reduction {
        Reduction::Average => T::part(ranks),
        Reduction::PreMulSum(Scalar::Bytes(scalar)) => Some(T::read(&scalar)),
        _ => None,
    };
    if let Some(factor) = factor {
        each(bytes, |own: T| own.times(factor));
    }
}

fn combine_of<T: Number>(reduction: Reduction, into: &mut [u8], from: &[u8]) {
    match reduction {
        Reduction::Sum | Reduction::Average | Reduction::PreMulSum(_) => both(into, from, T::add),
        Reduction::Prod => both(into, from, T::times),
        Reduction::Max => both(into, from, T::larger),
        Reduction::Min => both(into, from, T::smaller),
    }
}

fn after_of<T: Number>(reduction: Reduction, bytes: &mut [u8], ranks: usize) {
    if reduction == Reduction::Average && T::part(ranks).is_none() {
        each(bytes, |own: T| own.divided(ranks));
    }
}

macro_rules! of_type {
    ($data:expr, $function:ident($($argument:expr),+)) => {
        match $data {
            DataType::Int8 => $function::<i8>($($argument),+),
            DataType::Uint8 => $function::<u8>($($argument),+),
            DataType::Int32 => $function::<i32>($($argument),+),
            DataType::Uint32 => $function::<u32>($($argument),+),
            DataType::Int64 => $function::<i64>($($argument),+),
            DataType::Uint64 => $function::<u64>($($argument),+),
            DataType::Float16 => $function::<f16>($($argument),+),
            DataType::Float32 => $function::<f32>($($argument),+),
            DataType::Float64 => $function::<f64>($($argument),+),
            DataType::Bfloat16 => $function::<bf16>($($argument),+),
            // `group` has refused such a call.
            DataType::Float8E4M3 | DataType::Float8E5M2 => {}
        }
    };
}

/// Multiplies a rank's numbers by the reduction's factor, if it has one, before they are combined.
pub fn before(data: DataType, reduction: Reduction, bytes: &mut [u8], ranks: usize) {
    of_type!(data, before_of(reduction, bytes, ranks));
}

/// Reduces the numbers in `from`, another rank's, into those in `into`.
pub fn combine(data: DataType, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    of_type!(data, combine_of(reduction, into, from));
}

/// Finishes the combined numbers: divides those of an average of integers.
pub fn after(data: DataType, reduction: Reduction, bytes: &mut [u8], ranks: usize) {
    of_type!(data, after_of(reduction, bytes, ranks));
}

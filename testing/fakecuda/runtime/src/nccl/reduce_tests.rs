//! Tests of the reductions of the stand-in for NCCL: sum, product, maximum, minimum and average.

use half::{bf16, f16};

use super::reduce::{DataType, Reduction, Scalar, after, before, combine};

/// Reduces the numbers of all ranks to one list, with the same calls as a collective.
fn reduced(data: DataType, reduction: Reduction, ranks: &[Vec<u8>]) -> Vec<u8> {
    let own = |bytes: &Vec<u8>| {
        let mut bytes = bytes.clone();
        before(data, reduction, &mut bytes, ranks.len());
        bytes
    };
    let mut all = own(&ranks[0]);
    ranks[1..].iter().for_each(|bytes| combine(data, reduction, &mut all, &own(bytes)));
    after(data, reduction, &mut all, ranks.len());
    all
}

macro_rules! check {
    ($data:ident, $type:ty, $reduction:expr, [$($rank:expr),+] => $expected:expr) => {
        let bytes = |numbers: &[$type]| numbers.iter().flat_map(|it| it.to_ne_bytes()).collect::<Vec<u8>>();
        let ranks = [$(bytes(&$rank)),+];
        let found = reduced(DataType::$data, $reduction, &ranks);
        assert_eq!(found, bytes(&$expected), "{} {:?}", stringify!($data), $reduction);
    };
}

#[test]
fn integers_wrap_and_their_averages_are_rounded_towards_zero() {
    check!(Int8, i8, Reduction::Sum, [[100, -100, 3], [100, -100, 4]] => [-56, 56, 7]);
    check!(Uint8, u8, Reduction::Prod, [[16, 3], [17, 5]] => [16, 15]);
    check!(Int32, i32, Reduction::Average, [[-7, 7, 1], [0, 0, 0]] => [-3, 3, 0]);
    check!(Uint32, u32, Reduction::Max, [[1, u32::MAX], [2, 0]] => [2, u32::MAX]);
    check!(Int64, i64, Reduction::Min, [[-1, i64::MIN], [1, 0]] => [-1, i64::MIN]);
    check!(Uint64, u64, Reduction::Average, [[u64::MAX - 1, 6], [0, 1], [1, 2]] => [u64::MAX / 3, 3]);
}

#[test]
fn floating_point_numbers_are_rounded_after_each_operation() {
    check!(Float32, f32, Reduction::Sum, [[1.5, 1e8], [2.0, 1.0], [0.25, -1e8]] => [3.75, 0.0]);
    check!(Float64, f64, Reduction::Average, [[1.0], [2.0], [4.0]] => [1.0 / 3.0 + 2.0 / 3.0 + 4.0 / 3.0]);
    // In float16, 2048 + 1 rounds to 2048, and so does the second 1. Rounding only the sum would give 2050.
    let numbers = [2048.0, 1.0, 1.0].map(|number| [f16::from_f32(number)]);
    check!(Float16, f16, Reduction::Sum, [numbers[0], numbers[1], numbers[2]] => [f16::from_f32(2048.0)]);
    let numbers = [256.0, 1.0, 1.0].map(|number| [bf16::from_f32(number)]);
    check!(Bfloat16, bf16, Reduction::Sum, [numbers[0], numbers[1], numbers[2]] => [bf16::from_f32(256.0)]);
    // An average first multiplies each rank's number by 1/3, which is itself rounded.
    let third = f16::from_f32(1.0 / 3.0);
    let three = [f16::from_f32(3.0)];
    let expected = (three[0] * third + three[0] * third) + three[0] * third;
    check!(Float16, f16, Reduction::Average, [three, three, three] => [expected]);
}

#[test]
fn maximum_and_minimum_ignore_nan() {
    check!(Float32, f32, Reduction::Max, [[f32::NAN, 1.0], [3.0, f32::NAN]] => [3.0, 1.0]);
    check!(Float32, f32, Reduction::Min, [[f32::NAN, 1.0], [3.0, f32::NAN]] => [3.0, 1.0]);
}

#[test]
fn a_factor_multiplies_each_ranks_numbers_first() {
    let mut scalar = [0; 8];
    scalar[..4].copy_from_slice(&0.5f32.to_ne_bytes());
    check!(Float32, f32, Reduction::PreMulSum(Scalar::Bytes(scalar)), [[2.0, 3.0], [4.0, -1.0]] => [3.0, 1.0]);
}

#[test]
fn data_types_and_operators_have_the_values_of_nccl_h() {
    let sizes: Vec<usize> = (0..12).map(|number| DataType::new(number).unwrap().size()).collect();
    assert_eq!(sizes, [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]);
    assert_eq!((DataType::new(9), DataType::new(12), DataType::new(-1)), (Some(DataType::Bfloat16), None, None));
    assert_eq!((Reduction::new(4), Reduction::new(5)), (Some(Reduction::Average), None));
    assert!(!DataType::Float8E4M3.can_be_reduced());
}

//! A check of a host before training: memory, arithmetic and an all-reduce of each of its ranks.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor, no_grad};

use crate::error::DdpError;
use crate::group::ProcessGroup;
use overdrive_ffi::c10d::ReduceOp;

/// What a [check](check_node) looks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCheckOptions {
    /// How much memory each rank writes and reads, in MiB; 256 by default.
    pub memory_mib: usize,
    /// How long each rank multiplies matrices; half a second by default, and once at least.
    pub compute: Duration,
    /// The side of these matrices; 512 by default, at most 4096.
    pub side: usize,
    /// The fewest floating-point operations per second that a device may reach, in 10^9; none by default.
    pub least_gflops: f64,
    /// The fewest MB (10^6 bytes) per second that an all-reduce may reach, by the size of its tensor; none by default.
    pub least_mb_per_second: f64,
}

impl Default for NodeCheckOptions {
    fn default() -> Self {
        Self {
            memory_mib: 256,
            compute: Duration::from_millis(500),
            side: 512,
            least_gflops: 0.0,
            least_mb_per_second: 0.0,
        }
    }
}

/// What a healthy rank has reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeReport {
    /// 10^9 floating-point operations per second in products of matrices.
    pub gflops: f64,
    /// MB (10^6 bytes) per second of an all-reduce, by the size of its tensor.
    pub mb_per_second: f64,
}

/// Numbers of an all-reduce: 4 MiB.
const REDUCED: i64 = 1 << 20;
/// All-reduces that are timed.
const ROUNDS: i64 = 4;
/// Numbers that are written and read at once: 32 MiB.
const PIECE: i64 = 8 << 20;

/// Checks this rank's device: writes patterns to memory and reads them, multiplies matrices whose product is known, and sums
/// over the group's ranks what each of them has. `overdrive-run --node-check overdrive-node-check` runs it on each host
/// before the host takes part in a run.
///
/// # Errors
/// [`DdpError::UnfitNode`] with what is wrong, also for memory that cannot be allocated and for a device that is slower
/// than the options ask; [`DdpError::TimedOut`] and [`DdpError::Lost`] where another rank is missing.
///
/// # Syncs
/// Waits for the device and all ranks.
pub fn check_node(group: &ProcessGroup, options: &NodeCheckOptions) -> Result<NodeReport, DdpError> {
    no_grad(|| {
        let device = group.device();
        let unfit = |reason: String| DdpError::UnfitNode { device, reason };
        memory(device, options.memory_mib).map_err(unfit)?;
        let gflops = arithmetic(device, options, add_product).map_err(unfit)?;
        let mb_per_second = all_reduce(group)?;
        if gflops < options.least_gflops {
            let least = options.least_gflops;
            return Err(unfit(format!("{gflops:.1} GFLOP/s in products of matrices, and at least {least} are wanted")));
        }
        if mb_per_second < options.least_mb_per_second {
            let least = options.least_mb_per_second;
            return Err(unfit(format!("{mb_per_second:.1} MB/s in an all-reduce, and at least {least} are wanted")));
        }
        Ok(NodeReport { gflops, mb_per_second })
    })
}

/// Writes all of the memory before it reads any of it, twice, with patterns in which each bit is set once.
fn memory(device: Device, mib: usize) -> Result<(), String> {
    let failed = |error: tch::TchError| format!("{mib} MiB of memory: {error}");
    let total = i64::try_from(mib).ok().and_then(|mib| mib.checked_mul(1 << 18));
    let total = total.ok_or_else(|| format!("{mib} MiB of memory are more than any device has"))?;
    let all = Tensor::f_empty([total], (Kind::Int, device)).map_err(failed)?;
    let starts = || (0..total).step_by(PIECE as usize).map(|at| (at, PIECE.min(total - at)));
    for mask in [0x5555_5555, !0x5555_5555] {
        for (start, length) in starts() {
            let expected = pattern(start, length, mask, device).map_err(failed)?;
            all.f_narrow(0, start, length).and_then(|mut piece| piece.f_copy_(&expected)).map_err(failed)?;
        }
        for (start, length) in starts() {
            let expected = pattern(start, length, mask, device).map_err(failed)?;
            let wrong = all.f_narrow(0, start, length).and_then(|piece| piece.f_ne_tensor(&expected));
            let wrong = wrong.and_then(|it| it.f_sum(Kind::Int64)).map_err(failed)?;
            let wrong = i64::try_from(&wrong).map_err(failed)?;
            if wrong > 0 {
                return Err(format!("{wrong} of {length} numbers in memory are not what was written"));
            }
        }
    }
    Ok(())
}

/// Differs from place to place, so that wrong addresses are found too.
fn pattern(start: i64, length: i64, mask: i32, device: Device) -> Result<Tensor, tch::TchError> {
    // Places beyond 2^31 count from the start again.
    let start = start & i64::from(i32::MAX >> 1);
    let places = Tensor::f_arange_start(start, start + length, (Kind::Int, device))?;
    places.f_bitwise_xor_tensor(&Tensor::from(mask).f_to_device(device)?)
}

/// Adds the product of two matrices to a third one.
fn add_product(sum: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<(), tch::TchError> {
    sum.f_addmm_(left, right).map(drop)
}

/// Adds up products of matrices of small whole numbers by `add_product`. They are exact, also in TF32 and bfloat16 with sums
/// in float32. Returns 10^9 operations per second.
fn arithmetic(
    device: Device,
    options: &NodeCheckOptions,
    mut add_product: impl FnMut(&mut Tensor, &Tensor, &Tensor) -> Result<(), tch::TchError>,
) -> Result<f64, String> {
    let failed = |error: tch::TchError| format!("a product of matrices: {error}");
    // float32 holds whole numbers up to 2^24, and those of a product are at most 6 * 6 * side.
    let side = i64::try_from(options.side.clamp(1, 4096)).unwrap_or(4096);
    let at_once = (1 << 24) / (36 * side);
    let whole = |step: i64| -> Result<Tensor, tch::TchError> {
        let numbers = Tensor::f_arange(side * side, (Kind::Int64, device))?;
        let scaled = numbers.f_multiply(&Tensor::from(step).f_to_device(device)?)?;
        scaled.f_remainder_tensor(&Tensor::from(7i64).f_to_device(device)?)?.f_view([side, side])
    };
    let (left, right) = (whole(5).map_err(failed)?, whole(3).map_err(failed)?);
    // The sums of the product's rows, in whole numbers: float32 and TF32 could not hold them.
    let by_rows = (|| {
        let sums = right.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Int64)?;
        left.f_multiply(&sums)?.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Int64)
    })();
    let by_rows = by_rows.and_then(|it| it.f_to_kind(Kind::Double)).map_err(failed)?;
    let [left, right] = [left.f_to_kind(Kind::Float), right.f_to_kind(Kind::Float)];
    let (left, right) = (left.map_err(failed)?, right.map_err(failed)?);
    let mut sum = left.f_zeros_like().map_err(failed)?;
    let started = Instant::now();
    let (mut products, mut added) = (0u32, 0i64);
    loop {
        add_product(&mut sum, &left, &right).map_err(failed)?;
        products += 1;
        added += 1;
        let is_last = started.elapsed() >= options.compute;
        if is_last || added == at_once {
            let expected = by_rows.f_multiply(&Tensor::from(added as f64).f_to_device(device).map_err(failed)?);
            let off = sum.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
            let off = off.and_then(|sums| sums.f_sub(&expected?)).map_err(failed)?;
            let off = off.f_abs().and_then(|it| it.f_max()).map_err(failed)?;
            let off = f64::try_from(&off).map_err(failed)?;
            // A NaN is no 0.
            if off != 0.0 {
                return Err(format!("a product of matrices is wrong: its rows' sums differ by up to {off}"));
            }
            let _zeros = sum.f_zero_().map_err(failed)?;
            added = 0;
        }
        if is_last {
            let operations = 2.0 * (side as f64).powi(3) * f64::from(products);
            return Ok(operations / started.elapsed().as_secs_f64() / 1e9);
        }
    }
}

/// Returns MB per second, by the size of the tensor.
fn all_reduce(group: &ProcessGroup) -> Result<f64, DdpError> {
    let (device, size) = (group.device(), group.size() as f64);
    let unfit = |reason: String| DdpError::UnfitNode { device, reason };
    let failed = |error: tch::TchError| unfit(format!("an all-reduce: {error}"));
    let mut took = Duration::ZERO;
    for round in 0..=ROUNDS {
        let mine = (group.rank() as i64 + 1) * (round + 1);
        let mut sum = Tensor::from(mine as f32).f_to_device(device).map_err(failed)?;
        sum = sum.f_expand([REDUCED], false).and_then(|it| it.f_contiguous()).map_err(failed)?;
        // A number that is read has been computed.
        let wait = |sum: &Tensor| sum.f_double_value(&[0]).map_err(failed);
        wait(&sum)?;
        group.barrier()?;
        let started = Instant::now();
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        wait(&sum)?;
        // The first one connects the ranks.
        if round > 0 {
            took += started.elapsed();
        }
        let ends = [sum.f_min().map_err(failed)?, sum.f_max().map_err(failed)?];
        let [least, most] = ends.map(|it| f64::try_from(&it).unwrap_or(f64::NAN));
        let expected = size * (size + 1.0) / 2.0 * (round + 1) as f64;
        if least != expected || most != expected {
            return Err(unfit(format!("an all-reduce gives {least} to {most}, and {expected} is right")));
        }
    }
    let bytes = 4.0 * (REDUCED * ROUNDS) as f64;
    Ok(bytes / 1e6 / took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_matrices_are_checked_exactly() {
        for side in [1, 64, 2048] {
            let options = NodeCheckOptions { side, compute: Duration::ZERO, ..Default::default() };
            assert!(arithmetic(Device::Cpu, &options, add_product).unwrap() > 0.0);
        }
    }

    #[test]
    fn every_product_is_checked() {
        let side = 64;
        let options = NodeCheckOptions { side, compute: Duration::from_secs(600), ..Default::default() };
        // The latter is beyond what is compared at once.
        for wrong in [3, (1 << 24) / (36 * side) + 1] {
            let mut products = 0;
            let said = arithmetic(Device::Cpu, &options, |sum, left, right| {
                add_product(sum, left, right)?;
                products += 1;
                let mut number = sum.f_get(7)?.f_get(9)?;
                if products == wrong { number.f_add_(&Tensor::from(1f32)).map(drop) } else { Ok(()) }
            });
            assert_eq!(said.unwrap_err(), "a product of matrices is wrong: its rows' sums differ by up to 1");
        }
    }
}

//! Compares Rust's values with Python's, number by number.

use tch::{Kind, Tensor};

use crate::record::{Check, Found, Record};

/// Returns how many values agree, how many do not, and the largest relative difference.
pub fn all(case: &str, record: &Record, found: &Found, verbose: bool) -> (usize, usize, f64) {
    let (mut passed, mut failed, mut worst) = (0, 0, 0.0f64);
    for check in &record.checks {
        match one(check, record, found) {
            Ok(difference) => {
                passed += 1;
                worst = worst.max(difference);
                if verbose {
                    println!("  {case}.{}: {difference:.1e}", check.name);
                }
            }
            Err(why) => {
                failed += 1;
                println!("  {case}.{} FAILED: {why}", check.name);
            }
        }
    }
    for name in found.names().filter(|name| record.expected(name).is_none()) {
        failed += 1;
        println!("  {case}.{name} FAILED: Python expects no such value");
    }
    (passed, failed, worst)
}

/// The relative difference of a value that agrees, or why it does not.
fn one(check: &Check, record: &Record, found: &Found) -> Result<f64, String> {
    let expected = record.expected(&check.name).ok_or("Python wrote no value")?;
    let found = found.get(&check.name).ok_or("Rust computed no value")?;
    if (found.kind(), found.size()) != (expected.kind(), expected.size()) {
        let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
        return Err(format!("{} in Rust, {} in Python", describe(found), describe(expected)));
    }
    if found.numel() == 0 {
        return Ok(0.0);
    }
    let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    // Equal infinities, and NaN in the same place, count as equal.
    let same = found.eq_tensor(&expected).logical_or(&found.isnan().logical_and(&expected.isnan()));
    let difference = (&found - &expected).abs().masked_fill(&same, 0.0);
    let allowed = expected.abs() * check.rtol + check.atol;
    let within = is_within(&difference, &allowed).logical_or(&same);
    let relative = (&difference / expected.abs().clamp_min(f64::MIN_POSITIVE)).masked_fill(&same, 0.0);
    let worst = relative.max().double_value(&[]);
    if within.all().int64_value(&[]) != 0 {
        return Ok(if check.atol > 0.0 {
            (&difference / (expected.abs() + 1.0)).max().double_value(&[])
        } else {
            worst
        });
    }
    let place = within.flatten(0, -1).to_kind(Kind::Int64).argmin(0, false).int64_value(&[]);
    let at = |tensor: &Tensor| tensor.flatten(0, -1).double_value(&[place]);
    Err(format!(
        "at {place}: {:e} in Rust, {:e} in Python (rtol {:e}, atol {:e})",
        at(&found),
        at(&expected),
        check.rtol,
        check.atol
    ))
}

/// Element by element; an infinite expected value, which would allow any difference, allows none.
fn is_within(difference: &Tensor, allowed: &Tensor) -> Tensor {
    difference.le_tensor(allowed).logical_and(&difference.isfinite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_finite_number_passes_for_an_infinite_one() {
        let infinite = Tensor::from_slice(&[f64::INFINITY, 1.0, f64::NAN]);
        let within = is_within(&infinite, &Tensor::from_slice(&[f64::INFINITY, 2.0, 2.0]));
        assert_eq!(Vec::<bool>::try_from(within).unwrap(), [false, true, false]);
    }
}

//! Batch sizes, of which one or two follow from the others.

use super::arguments::{MICRO, STEPS, TOTAL};
use super::error::DeepSpeedError;
use super::tree::Tree;

/// Sizes that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub total: u64,
    pub micro: u64,
    pub steps: u64,
}

impl Batch {
    pub(super) fn read(tree: &Tree, ranks: usize) -> Result<Self, DeepSpeedError> {
        let ranks = ranks as u64;
        if ranks == 0 {
            return Err(DeepSpeedError::BatchSizes("there are 0 ranks, but should be at least 1".to_owned()));
        }
        let (total, micro, steps) = (tree.count(TOTAL, 1)?, tree.count(MICRO, 1)?, tree.count(STEPS, 1)?);
        let (micro, steps) = match (total, micro, steps) {
            (_, Some(micro), Some(steps)) => (micro, steps),
            (Some(total), Some(micro), None) => (micro, total / micro / ranks),
            (Some(total), None, steps) => (total / ranks / steps.unwrap_or(1), steps.unwrap_or(1)),
            (None, Some(micro), None) => (micro, 1),
            (None, None, _) => {
                let (key, reason) = (TOTAL.to_owned(), format!("give it, or `{MICRO}`"));
                return Err(DeepSpeedError::Missing { key, reason });
            }
        };
        let product = micro.checked_mul(steps).and_then(|it| it.checked_mul(ranks));
        match product {
            Some(product) if product > 0 && total.is_none_or(|total| total == product) => {
                Ok(Self { total: product, micro, steps })
            }
            _ => Err(does_not_fit((total, micro, steps), ranks)),
        }
    }
}

fn does_not_fit((total, micro, steps): (Option<u64>, u64, u64), ranks: u64) -> DeepSpeedError {
    let product = u128::from(micro) * u128::from(steps) * u128::from(ranks);
    let total = total.map_or_else(|| "too large".to_owned(), |total| total.to_string());
    DeepSpeedError::BatchSizes(format!(
        "`{TOTAL}` is {total}, but `{MICRO}` of {micro} * `{STEPS}` of {steps} * {ranks} ranks is {product}: they should \
         be equal"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, ranks: usize) -> Result<(u64, u64, u64), String> {
        let batch = Batch::read(&Tree::parse(text).unwrap(), ranks).map_err(|error| error.to_string())?;
        Ok((batch.total, batch.micro, batch.steps))
    }

    #[test]
    fn one_or_two_sizes_follow_from_the_others() {
        let all = r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}"#;
        let expected = Ok((24, 3, 2));
        assert_eq!(read(all, 4), expected);
        assert_eq!(read(r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}"#, 4), expected);
        assert_eq!(read(r#"{"train_batch_size": 24, "gradient_accumulation_steps": 2}"#, 4), expected);
        assert_eq!(read(r#"{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}"#, 4), expected);
        assert_eq!(read(r#"{"train_batch_size": 24}"#, 4), Ok((24, 6, 1)));
        assert_eq!(read(r#"{"train_micro_batch_size_per_gpu": 3}"#, 4), Ok((12, 3, 1)));
    }

    #[test]
    fn sizes_that_do_not_multiply_are_refused_with_the_product() {
        let all = r#"{"train_batch_size": 25, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}"#;
        let expected = "batch sizes do not fit: `train_batch_size` is 25, but `train_micro_batch_size_per_gpu` of 3 * \
                        `gradient_accumulation_steps` of 2 * 4 ranks is 24: they should be equal";
        assert_eq!(read(all, 4).unwrap_err(), expected);
        assert!(read(r#"{"train_batch_size": 25, "train_micro_batch_size_per_gpu": 3}"#, 4).is_err());
        assert!(read(r#"{"train_batch_size": 2}"#, 4).is_err());
        assert!(read(r#"{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 8}"#, 1).is_err());
        let large =
            r#"{"train_micro_batch_size_per_gpu": 9000000000000000, "gradient_accumulation_steps": 9000000000000000}"#;
        assert!(read(large, 4).unwrap_err().contains("is too large"));
    }

    #[test]
    fn sizes_that_are_missing_or_no_counts_are_named() {
        let told = read(r#"{"gradient_accumulation_steps": 2}"#, 1).unwrap_err();
        assert_eq!(told, "`train_batch_size` is missing: give it, or `train_micro_batch_size_per_gpu`");
        assert!(read(r#"{"train_batch_size": 0}"#, 1).unwrap_err().contains("`train_batch_size` is 0"));
        assert!(read(r#"{"train_batch_size": 1.5}"#, 1).unwrap_err().contains("a whole number of at least 1"));
        assert!(read(r#"{"train_batch_size": 1}"#, 0).unwrap_err().contains("0 ranks"));
    }
}

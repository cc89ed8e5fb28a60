//! The main job's command line, shared by the bench that obeys it and by `cargo xtask bench`, which shows its help
//! without building libtorch.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use thiserror::Error;

use crate::Technique;

/// Images and epochs of a full run, and of a quick one.
const FULL: Size = Size { train_images: usize::MAX, test_images: usize::MAX, epochs: 5 };
const QUICK: Size = Size { train_images: 4_000, test_images: 1_000, epochs: 2 };

/// Trains one small model on MNIST without and with each technique; shows what each gained and whether accuracy held.
#[derive(Clone, Debug, PartialEq, Eq, Parser)]
#[command(name = "bench", max_term_width = 100)]
pub struct BenchOptions {
    /// Fewer images and epochs: under a minute on two cores, for a first look
    #[arg(long)]
    pub quick: bool,

    /// Only these techniques, separated by commas; baseline is always run, to compare with
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_enum)]
    pub only: Vec<Technique>,

    /// Epochs of each run, 1 to 1000 [default: 5, with --quick 2]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 1..=1_000))]
    pub epochs: Option<u32>,

    /// Interleaved repetitions of each technique, 1 to 100
    #[arg(long, value_name = "N", default_value = "3", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 1..=100))]
    pub repeat: u32,

    /// Seed of the initial weights and of the data order, 0 to 4294967295
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 0..=u32::MAX))]
    pub seed: u32,

    /// Threads that compute, 1 to 1024 [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 1..=1_024))]
    pub threads: Option<u32>,

    /// Where to train
    #[arg(long, value_name = "DEVICE", value_enum, default_value = "auto")]
    pub device: DeviceChoice,

    /// Folder of MNIST's four idx files, raw or .gz [default: the subset in data/mnist]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,

    /// Where to write the numbers
    #[arg(long, value_name = "PATH", default_value = "target/bench/report.json")]
    pub json: PathBuf,

    /// Where to write the page
    #[arg(long, value_name = "PATH", default_value = "target/bench/report.html")]
    pub report: PathBuf,

    /// Say whether a CUDA device is seen, and do nothing else
    #[arg(long)]
    pub check_device: bool,
}

/// The device that the command line asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// The first CUDA device where there is one, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// The first CUDA device; an error where there is none.
    Cuda,
}

/// How much is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// At most so many of the training images, from the first.
    pub train_images: usize,
    /// At most so many of the test images, from the first.
    pub test_images: usize,
    /// Times that a run sees each training image.
    pub epochs: u32,
}

/// Options that are each fine, yet ask for something that this machine does not have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// A technique was asked for by name that runs only on a CUDA device.
    #[error("--only {0} needs a CUDA device; leave it out, or run on a machine with one (--device cuda)")]
    NeedsCuda(Technique),
}

impl BenchOptions {
    /// How much is trained: the full or the quick size, with `--epochs` over it.
    pub fn size(&self) -> Size {
        let size = if self.quick { QUICK } else { FULL };
        Size { epochs: self.epochs.unwrap_or(size.epochs), ..size }
    }

    /// The techniques to run on a machine with or without a CUDA device, in the order of the rows, baseline first.
    ///
    /// # Errors
    ///
    /// [`OptionsError::NeedsCuda`] where `--only` names one that cannot run here.
    pub fn techniques(&self, cuda: bool) -> Result<Vec<Technique>, OptionsError> {
        if let Some(&technique) = self.only.iter().find(|technique| technique.needs_cuda() && !cuda) {
            return Err(OptionsError::NeedsCuda(technique));
        }
        let wanted = |technique: &Technique| match self.only.as_slice() {
            [] => cuda || !technique.needs_cuda(),
            only => *technique == Technique::Baseline || only.contains(technique),
        };
        Ok(Technique::ALL.into_iter().filter(wanted).collect())
    }
}

/// A whole number within `range`; the message says what would be right.
fn whole(text: &str, range: RangeInclusive<u32>) -> Result<u32, String> {
    match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!("give a whole number from {} to {}", range.start(), range.end())),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Result<BenchOptions, String> {
        BenchOptions::try_parse_from([&["bench"], args].concat()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definition_is_sound_and_the_defaults_are_those_of_the_help() {
        BenchOptions::command().debug_assert();
        let options = parse(&[]).unwrap();
        assert_eq!((options.repeat, options.size().epochs), (3, 5));
        assert_eq!(options.json, PathBuf::from("target/bench/report.json"));
        assert_eq!(parse(&["--quick"]).unwrap().size(), QUICK);
        assert_eq!(parse(&["--quick", "--epochs", "7"]).unwrap().size(), Size { epochs: 7, ..QUICK });
    }

    #[test]
    fn an_unknown_technique_is_answered_with_the_known_ones() {
        let error = parse(&["--only", "cache,prefetch"]).unwrap_err();
        assert!(error.contains("'prefetch'"), "{error}");
        for technique in Technique::ALL {
            assert!(error.contains(technique.name()), "{technique} is not in: {error}");
        }
    }

    #[test]
    fn a_number_out_of_range_is_answered_with_the_range() {
        let cases = [
            (["--epochs", "0"], "1 to 1000"),
            (["--epochs", "1001"], "1 to 1000"),
            (["--repeat", "0"], "1 to 100"),
            (["--threads", "1025"], "1 to 1024"),
            (["--threads", "-1"], "1 to 1024"),
            (["--seed", "4294967296"], "0 to 4294967295"),
            (["--seed", "dice"], "0 to 4294967295"),
        ];
        for (args, range) in cases {
            let error = parse(&args).unwrap_err();
            assert!(error.contains(range) && error.contains(args[0]), "{args:?}: {error}");
        }
    }

    #[test]
    fn baseline_comes_first_and_cuda_techniques_only_with_cuda() {
        let some = parse(&["--only", "combined,cache,cache"]).unwrap();
        assert_eq!(some.techniques(false).unwrap(), [Technique::Baseline, Technique::Cache, Technique::Combined]);
        let all = parse(&[]).unwrap();
        assert_eq!(all.techniques(true).unwrap(), Technique::ALL);
        assert!(all.techniques(false).unwrap().iter().all(|technique| !technique.needs_cuda()));
        let tf32 = parse(&["--only", "tf32"]).unwrap();
        assert_eq!(tf32.techniques(false), Err(OptionsError::NeedsCuda(Technique::Tf32)));
    }
}

//! The technique benchmark's command line, shared by the program that obeys it and by `cargo xtask bench`, which shows its
//! help without building libtorch.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use thiserror::Error;

use crate::{Contender, Workload};

/// Trains digits, photographs and text as Python's PyTorch, as plain tch and with Overdrive's techniques, in turns; shows
/// what each gains, and whether the model learns as much.
#[derive(Clone, Debug, PartialEq, Eq, Parser)]
#[command(name = "bench", max_term_width = 100)]
pub struct BenchOptions {
    /// A first table within a minute: a few seconds each, no technique by itself, no whole training
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,

    /// Train each workload as a whole with three seeds, for a fixed number of epochs or steps; takes up to an hour, and
    /// the page has the time to a target
    #[arg(long)]
    pub full: bool,

    /// Only these workloads, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_enum)]
    pub workload: Vec<Workload>,

    /// Only these ways of training, separated by commas; tch is always run, to compare with
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_enum)]
    pub only: Vec<Contender>,

    /// Rounds in which all take a turn, 1 to 100 [default: 3, with --full 5, with --quick 2]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 1..=100))]
    pub rounds: Option<u32>,

    /// Seed of the initial weights and of the data order, 0 to 4294967295
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 0..=u32::MAX))]
    pub seed: u32,

    /// The most threads that compute, 1 to 1024 [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = |text: &str| whole(text, 1..=1_024))]
    pub threads: Option<u32>,

    /// Where to train
    #[arg(long, value_name = "DEVICE", value_enum, default_value = "auto")]
    pub device: DeviceChoice,

    /// Folder of MNIST's four idx files, raw or .gz [default: the subset in data/mnist]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,

    /// Folder of JPEG photographs, in one folder a class [default: made by a seed, and those of Debian's packages
    /// mate-backgrounds, lomiri-wallpapers-16.04 and lomiri-wallpapers-20.04 that are installed]
    #[arg(long, value_name = "DIR")]
    pub photos: Option<PathBuf>,

    /// The Python that has torch 2.11.0 and torchvision; without them, its columns are absent. The variable OVERDRIVE_PYTHON
    /// names it too
    #[arg(long, value_name = "PATH", default_value_os_t = python_by_default(), value_parser = program)]
    pub python: PathBuf,

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

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A first table.
    Quick,
    /// Digits are trained as a whole once, the others for a number of steps.
    Default,
    /// All are trained as a whole, with three seeds.
    Full,
}

/// Options that are each fine, yet ask for something that this machine or this workload does not have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// A contender was asked for by name that runs only on a CUDA device.
    #[error("--only {0} needs a CUDA device; leave it out, or run on a machine with one (--device cuda)")]
    NeedsCuda(Contender),
    /// No chosen workload has it.
    #[error("--only {contender} is no way to train {workloads}; those are {known}")]
    NotHere {
        /// What was asked for.
        contender: Contender,
        /// The chosen workloads.
        workloads: String,
        /// What they can be trained by.
        known: String,
    },
}

impl BenchOptions {
    /// How much is measured.
    pub fn size(&self) -> Size {
        match (self.quick, self.full) {
            (true, _) => Size::Quick,
            (_, true) => Size::Full,
            _ => Size::Default,
        }
    }

    /// Rounds in which the contenders take turns.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(match self.size() {
            Size::Quick => 2,
            Size::Default => 3,
            Size::Full => 5,
        })
    }

    /// The workloads, in the order of the report.
    pub fn workloads(&self) -> Vec<Workload> {
        let is_chosen = |workload: &Workload| self.workload.is_empty() || self.workload.contains(workload);
        Workload::ALL.into_iter().filter(is_chosen).collect()
    }

    /// What trains a workload on a machine with or without a CUDA device, in the order of the rows.
    pub fn contenders(&self, workload: Workload, cuda: bool) -> Vec<Contender> {
        // Compiling takes long, and pays where much is computed. Next to so much decoding, `channels_last` and `fused`
        // change nothing by themselves; combined tries them.
        let is_left_out = |contender: &Contender| match (self.size(), workload) {
            (Size::Full, _) => false,
            (Size::Quick, _) => contender.is_technique() || *contender == Contender::PytorchCompiled,
            (Size::Default, Workload::Photos) => {
                matches!(contender, Contender::PytorchCompiled | Contender::ChannelsLast | Contender::Fused)
            }
            (Size::Default, Workload::Digits) => *contender == Contender::PytorchCompiled,
            (Size::Default, Workload::Text) => *contender == Contender::Compiled,
        };
        let is_chosen = |contender: &Contender| match self.only.as_slice() {
            [] => !is_left_out(contender),
            only => *contender == Contender::Tch || only.contains(contender),
        };
        workload.contenders(cuda).into_iter().filter(is_chosen).collect()
    }

    /// That all contenders asked for by name can run.
    ///
    /// # Errors
    /// [`OptionsError`], which names the first that cannot.
    pub fn check(&self, cuda: bool) -> Result<(), OptionsError> {
        if let Some(&contender) = self.only.iter().find(|contender| contender.needs_cuda() && !cuda) {
            return Err(OptionsError::NeedsCuda(contender));
        }
        let workloads = self.workloads();
        let known: Vec<Contender> = Contender::ALL
            .into_iter()
            .filter(|it| workloads.iter().any(|workload| workload.contenders(cuda).contains(it)))
            .collect();
        match self.only.iter().find(|contender| !known.contains(contender)) {
            None => Ok(()),
            Some(&contender) => Err(OptionsError::NotHere {
                contender,
                workloads: crate::text::list(&workloads),
                known: crate::text::list(&known),
            }),
        }
    }
}

/// The Python that the variable OVERDRIVE_PYTHON names, else the first one on the path. It is a default and no `env` of
/// clap's, which would count as given on the command line: then each error of usage would name `--python`.
pub(crate) fn python_by_default() -> PathBuf {
    std::env::var_os("OVERDRIVE_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}

/// A program: a path that exists, or a name to be looked up in PATH.
pub(crate) fn program(text: &str) -> Result<PathBuf, String> {
    exists_unless(text, &python_by_default())
}

/// The default may be missing, as the variable OVERDRIVE_PYTHON may name what is gone: the report says so.
fn exists_unless(text: &str, default: &Path) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match text.contains('/') && !path.is_file() && path != default {
        true => Err("there is no such program".to_owned()),
        false => Ok(path),
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
        let rounds = |args: &[&str]| parse(args).unwrap().rounds();
        assert_eq!((rounds(&[]), rounds(&["--quick"]), rounds(&["--full"]), rounds(&["--rounds", "9"])), (3, 2, 5, 9));
        assert_eq!(parse(&[]).unwrap().json, PathBuf::from("target/bench/report.json"));
        let error = parse(&["--quick", "--full"]).unwrap_err();
        assert!(error.contains("cannot be used with") && !error.contains("--python"), "{error}");
    }

    #[test]
    fn the_help_says_that_whole_trainings_have_a_fixed_length() {
        let command = BenchOptions::command();
        let full = command.get_arguments().find(|argument| argument.get_id() == "full").unwrap();
        let help = full.get_help().unwrap().to_string();
        assert!(help.contains("a fixed number of epochs or steps") && help.contains("time to a target"), "{help}");
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = parse(&["--only", "fused,cache"]).unwrap_err();
        assert!(error.contains("'cache'"), "{error}");
        assert!(Contender::ALL.iter().all(|contender| error.contains(&contender.name())), "{error}");
        let error = parse(&["--workload", "digit"]).unwrap_err();
        assert!(Workload::ALL.iter().all(|workload| error.contains(&workload.name())), "{error}");
    }

    #[test]
    fn a_number_out_of_range_is_answered_with_the_range() {
        let cases = [
            (["--rounds", "0"], "1 to 100"),
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
    fn a_python_that_does_not_exist_is_refused_at_once() {
        let error = parse(&["--python", "/nonexistent/python3"]).unwrap_err();
        assert!(error.contains("there is no such program"), "{error}");
        assert!(exists_unless("/gone/python3", Path::new("/gone/python3")).is_ok(), "the default");
        // Whether PATH has one is seen when it is started.
        assert_eq!(parse(&["--python", "python4"]).unwrap().python, PathBuf::from("python4"));
    }

    #[test]
    fn plain_tch_is_always_run_and_what_cannot_run_is_refused() {
        let some = parse(&["--only", "combined,fused,fused"]).unwrap();
        assert_eq!(some.contenders(Workload::Text, false), [Contender::Tch, Contender::Fused, Contender::Combined]);
        assert_eq!(some.check(false), Ok(()));
        let quick = parse(&["--quick"]).unwrap().contenders(Workload::Digits, true);
        assert_eq!(quick, [Contender::Pytorch, Contender::PytorchTuned, Contender::Tch, Contender::Combined]);
        let full = parse(&["--full"]).unwrap().contenders(Workload::Photos, false);
        assert_eq!(full, Workload::Photos.contenders(false));
        let tf32 = parse(&["--only", "tf32"]).unwrap();
        assert_eq!(tf32.check(false), Err(OptionsError::NeedsCuda(Contender::Tf32)));
        assert_eq!(tf32.check(true), Ok(()));
        let error = parse(&["--workload", "text", "--only", "scaled_decode"]).unwrap().check(false).unwrap_err();
        assert!(error.to_string().starts_with("--only scaled_decode is no way to train text; those are pytorch,"));
    }
}

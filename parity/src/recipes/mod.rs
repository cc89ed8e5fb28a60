//! Runs each recipe beside its Python counterpart with the same seed, on one thread, and compares them loss by loss.

mod statements;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::{Context, Result, anyhow, bail, ensure};

use self::statements::{Counts, PARTS};

/// The programs and folders.
pub struct Options {
    pub filter: String,
    pub python: PathBuf,
    /// With the examples' programs.
    pub programs: PathBuf,
    pub workspace: PathBuf,
}

/// How equal the losses have to be.
#[derive(Clone, Copy)]
enum Bound {
    /// To the bit: all of them, and at least so many.
    Bits(usize),
    /// Within this relative difference: all of them, and at least so many.
    Relative(f64, usize),
}

/// Trained by two ranks as well.
const WITH_RANKS: [&str; 1] = ["nanogpt"];

const RECIPES: &[(&str, Bound)] = &[
    ("mnist", Bound::Bits(50)),
    ("nanogpt", Bound::Bits(50)),
    ("ema_swa", Bound::Bits(50)),
    ("word_language_model", Bound::Bits(50)),
    ("imagenet", Bound::Relative(1e-5, 20)),
    ("amp", Bound::Relative(1e-5, 20)),
    ("pinn", Bound::Relative(1e-5, 20)),
    ("light_models", Bound::Relative(1e-5, 20)),
];

pub fn run(options: &Options) -> Result<ExitCode> {
    let recipes: Vec<_> = RECIPES.iter().filter(|(name, _)| name.contains(&options.filter)).collect();
    ensure!(!recipes.is_empty(), "no recipe's name contains {:?}", options.filter);
    let (mut passed, mut failed, mut ours, mut theirs) = (0, 0, Counts::default(), Counts::default());
    let mut too_long = Vec::new();
    println!("statements: ours, Python's, ratio   losses");
    for (name, bound) in recipes {
        let rust = statements::of_rust(&options.workspace.join(format!("examples/recipes/{name}.rs")))?;
        let python =
            statements::of_python(&options.python, &options.workspace.join(format!("parity/recipes/{name}.py")))?;
        let mut verdict = |ranks: Option<usize>| {
            let compared = losses(options, name, ranks).and_then(|(ours, theirs)| compare(&ours, &theirs, *bound));
            match compared {
                Ok((count, verdict)) => {
                    passed += count;
                    verdict
                }
                Err(error) => {
                    failed += 1;
                    format!("FAILED: {error:#}")
                }
            }
        };
        println!("{name}: {}   {}", lengths(&rust, &python), verdict(None));
        if WITH_RANKS.contains(name) {
            println!("{name}, 2 ranks: {}", verdict(Some(2)));
        }
        if rust[2] as f64 > 1.15 * python[2] as f64 {
            too_long.push(*name);
        }
        for part in 0..PARTS.len() {
            ours[part] += rust[part];
            theirs[part] += python[part];
        }
    }
    println!("all: {}", lengths(&ours, &theirs));
    if !too_long.is_empty() {
        println!("longer than 1.15x in training: {}", too_long.join(", "));
    }
    let failed = failed + too_long.len();
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn lengths(ours: &Counts, theirs: &Counts) -> String {
    let length = |part: usize| {
        let ratio = ours[part] as f64 / theirs[part].max(1) as f64;
        format!("{} {}, {}, {ratio:.2}x", PARTS[part].to_lowercase(), ours[part], theirs[part])
    };
    (0..PARTS.len()).rev().map(length).collect::<Vec<_>>().join("; ")
}

/// The losses that both print, ours first; of so many ranks together, if given.
fn losses(options: &Options, name: &str, ranks: Option<usize>) -> Result<(Vec<f64>, Vec<f64>)> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("images.safetensors");
    let args: Vec<PathBuf> = match name {
        "imagenet" => {
            printed(Command::new(&options.python).arg(options.workspace.join("parity/recipes/images.py")).arg(&data))?;
            vec!["--data".into(), data, "--checkpoints".into(), folder.path().into()]
        }
        _ => Vec::new(),
    };
    let run = |program: &mut Command, out: &str| {
        printed(program.args(&args).env("OMP_NUM_THREADS", "1").env("OUT_DIR", folder.path().join(out)))
    };
    let script = options.workspace.join(format!("parity/recipes/{name}.py"));
    let program = options.programs.join(format!("recipe_{name}"));
    let (mut theirs, mut ours) = match ranks {
        None => (Command::new(&options.python), Command::new(&program)),
        Some(ranks) => {
            let mut theirs = Command::new(&options.python);
            theirs.args(["-m", "torch.distributed.run", "--standalone", &format!("--nproc-per-node={ranks}")]);
            let mut ours = Command::new(options.programs.with_file_name("overdrive-run"));
            ours.arg(format!("--nproc-per-node={ranks}")).arg(&program);
            (theirs, ours)
        }
    };
    std::fs::create_dir(folder.path().join("theirs"))?;
    let (ours, theirs) = thread::scope(|scope| {
        let theirs = scope.spawn(|| run(theirs.arg(script), "theirs"));
        (run(&mut ours, "ours"), theirs.join())
    });
    Ok((ours?, theirs.map_err(|_| anyhow!("a thread has panicked"))??))
}

/// The numbers after the word `loss` in what a program prints.
fn printed(command: &mut Command) -> Result<Vec<f64>> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(numbers(&String::from_utf8_lossy(&output.stdout)))
}

fn numbers(text: &str) -> Vec<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let after = |pair: &[&str]| (pair[0] == "loss").then(|| pair[1].trim_end_matches(',').parse().ok()).flatten();
    words.windows(2).filter_map(after).collect()
}

fn compare(ours: &[f64], theirs: &[f64], bound: Bound) -> Result<(usize, String)> {
    ensure!(ours.len() == theirs.len(), "{} losses, Python has {}", ours.len(), theirs.len());
    ensure!(theirs.iter().all(|loss| loss.is_finite()), "Python's losses are not finite");
    let differs = ours.iter().zip(theirs).position(|(own, other)| own.to_bits() != other.to_bits());
    let equal = differs.unwrap_or(ours.len());
    let text = format!("{equal} of {} equal to the bit", ours.len());
    match bound {
        Bound::Bits(least) => {
            ensure!(ours.len() >= least, "only {} losses", ours.len());
            if let Some(at) = differs {
                bail!("loss {at} is {}, Python's {}; {text}", ours[at], theirs[at]);
            }
        }
        Bound::Relative(bound, least) => {
            ensure!(ours.len() >= least, "only {} losses", ours.len());
            for (at, (own, other)) in ours.iter().zip(theirs).enumerate() {
                let difference = (own - other).abs() / other.abs();
                // Not so either if ours is not a number.
                ensure!(difference <= bound, "loss {at} is {own}, Python's {other}: {difference:.1e}; {text}");
            }
        }
    }
    Ok((ours.len(), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_after_loss_are_found() {
        assert_eq!(numbers("step 1: loss 0.5, lr 1\ntrain loss 2, val loss 1e-3\nloss is 4"), [0.5, 2.0, 0.001]);
    }

    #[test]
    fn a_difference_is_named() {
        let error = compare(&[1.0, 2.0], &[1.0, 2.5], Bound::Bits(2)).unwrap_err().to_string();
        assert_eq!(error, "loss 1 is 2, Python's 2.5; 1 of 2 equal to the bit");
        assert!(compare(&[1.0], &[1.0, 2.0], Bound::Bits(1)).is_err());
        assert!(compare(&[1.0], &[1.0], Bound::Bits(2)).is_err());
        assert!(compare(&[1.0, 2.0], &[1.0, 2.00001], Bound::Relative(1e-5, 2)).is_ok());
        assert!(compare(&[1.0, 2.1], &[1.0, 2.0], Bound::Relative(1e-5, 2)).is_err());
        assert!(compare(&[1.0, f64::NAN], &[1.0, 2.0], Bound::Relative(1e-5, 1)).is_err());
    }
}

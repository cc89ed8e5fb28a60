//! Options of compiled steps.

use std::time::Duration;

/// Options of a compiled step.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether a step that cannot be compiled, or only in part, is an error. By default it runs uncompiled, and says so
    /// once. The error comes before a step changes anything: the step that finds the reason is still made, and the next
    /// ones fail.
    pub strict: bool,
    /// How many batches of different shapes, dtypes or modes of the model are compiled, each for itself; the others run
    /// uncompiled, or are errors if `strict`. Default 4.
    pub shapes: usize,
    /// Whether a second size of the batch (its tensors' first dimension) is compiled for all sizes from 2. The first
    /// step of each further size runs uncompiled. Default true. (`dynamic` of `torch.compile`)
    pub dynamic: bool,
    /// Whether compiled and uncompiled steps are timed in turns, and the faster ones taken, which is said. Takes 10 steps
    /// of each, all of them real ones. Default false.
    pub auto: bool,
    /// How long one compilation may take, and how long another process that compiles the same step is waited for; then
    /// the step counts as one that cannot be compiled. Default one hour.
    pub timeout: Duration,
    /// Whether it says on standard error what it does. Default true.
    pub verbose: bool,
}

impl Default for Options {
    fn default() -> Self {
        let timeout = Duration::from_secs(3600);
        Self { strict: false, shapes: 4, dynamic: true, auto: false, timeout, verbose: true }
    }
}

impl Options {
    /// Compiled loops are split between this many threads: those of libtorch.
    pub(crate) fn threads(&self) -> i64 {
        tch::get_num_threads().into()
    }

    pub(crate) fn say(&self, text: &str) {
        if self.verbose {
            eprintln!("overdrive-compile: {text}");
        }
    }

    pub(crate) fn progress(&self) -> impl FnMut(&str) {
        let options = self.clone();
        move |stage| {
            options.say(match stage {
                "trace" => "compiling a step: this takes a minute, and is kept for the next run",
                "compile" => "compiling its kernels",
                other => other,
            });
        }
    }
}

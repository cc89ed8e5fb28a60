//! Options of compiled steps.

/// Options of a compiled step.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether a step that cannot be compiled is an error. By default it runs uncompiled, and says so once.
    pub strict: bool,
    /// How many batches of different shapes, dtypes or modes of the model are compiled, each for itself; the others run
    /// uncompiled. Default 4.
    pub shapes: usize,
    /// Whether a second size of the batch (its tensors' first dimension) is compiled for all sizes from 2. The first
    /// step of each further size runs uncompiled. Default true. (`dynamic` of `torch.compile`)
    pub dynamic: bool,
    /// Whether compiled and uncompiled steps are timed in turns, and the faster ones taken, which is said. Takes 10 steps
    /// of each, all of them real ones. Default false.
    pub auto: bool,
    /// Whether it says on standard error what it does. Default true.
    pub verbose: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { strict: false, shapes: 4, dynamic: true, auto: false, verbose: true }
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
                "wait" => "another process compiles this step: waiting for it",
                "compile" => "compiling its kernels",
                other => other,
            });
        }
    }
}

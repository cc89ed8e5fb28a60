//! The parts that are combined: one choice of each part makes a cell.

/// Enums whose choices can be listed, numbered and named.
macro_rules! parts {
    ($($(#[$doc:meta])* $part:ident: $kind:ident { $($(#[$choice_doc:meta])* $choice:ident = $name:literal,)+ })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum $kind { $($(#[$choice_doc])* $choice,)+ }
        )+

        /// A combination of parts.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Cell { $(pub $part: $kind,)+ }

        /// The parts, and the names of their choices.
        pub const PARTS: &[(&str, &[&str])] = &[$((stringify!($part), &[$($name),+])),+];

        impl Cell {
            /// From the number of each part's choice.
            pub fn of(numbers: &[usize]) -> Self {
                let mut numbers = numbers.iter();
                Self { $($part: [$($kind::$choice),+][*numbers.next().expect("a number for each part")],)+ }
            }

            /// The number of each part's choice.
            pub fn numbers(&self) -> Vec<usize> {
                vec![$(self.$part as usize),+]
            }
        }
    };
}

parts! {
    optimizer: Opt {
        Sgd = "sgd",
        AdamW = "adamw",
        Lamb = "lamb(max_grad_norm)",
        Tch = "tch's sgd",
        Masters = "sgd(bfloat16, float32 masters)",
        InBackward = "adamw(in backward)",
        Lookahead = "lookahead(foreach adamw)",
        Sam = "sam(sgd)",
        SamLookahead = "sam(lookahead(sgd))",
        Joint = "joint(muon, adamw)",
        OneBit = "1-bit adam",
        ScheduleFree = "adamw(schedule-free)",
        Prodigy = "prodigy",
        Offloaded = "adamw(offloaded)",
    }
    scaler: Scaling { Off = "no scaler", On = "scaler", }
    accumulator: Accum { Off = "no accumulator", Samples = "windows of samples", Tokens = "windows of tokens", }
    clipping: Clip { Off = "no clipping", Norm = "clip by norm", Value = "clip by value", }
    average: Average { Off = "no ema", Ema = "ema", }
    schedule: Sched { Off = "no schedule", WarmUp = "warm-up", OneCycle = "one cycle", }
    resume: Resume { Off = "uninterrupted", On = "resumed", }
    ranks: Ranks { Alone = "alone", Ddp = "2 ranks", Views = "2 ranks (bucket views)", }
    data: Data { Plain = "sequential", Skip = "random, skip", Replace = "weighted, replace, workers", }
    overflow: Overflow {
        Never = "no overflow",
        First = "overflow in the first window",
        Open = "overflow in an open window",
        Short = "overflow in the last window of an epoch",
        OneRank = "overflow on one rank",
        Resumed = "overflow after the resume",
        Second = "overflow in SAM's second pass",
    }
    parameters: Params { Fixed = "parameters fixed", Unfrozen = "a bias unfrozen later", }
}

impl Opt {
    pub fn is_sam(self) -> bool {
        matches!(self, Self::Sam | Self::SamLookahead)
    }

    /// Whether its type has `add_param_group`.
    fn takes_groups(self) -> bool {
        matches!(self, Self::Sgd | Self::AdamW | Self::Lamb | Self::InBackward)
    }
}

impl Cell {
    /// Whether the cell is a program that can be written and that differs from a cell with fewer parts.
    pub fn is_program(&self) -> bool {
        let overflows = match self.overflow {
            Overflow::Never => true,
            // Without a scaler an overflow goes unnoticed: the weights become NaN, as in PyTorch.
            _ if self.scaler != Scaling::On => false,
            Overflow::First | Overflow::Short => true,
            Overflow::Open => self.accumulator != Accum::Off,
            Overflow::OneRank => self.ranks != Ranks::Alone,
            Overflow::Resumed => self.resume != Resume::Off,
            Overflow::Second => self.optimizer.is_sam(),
        };
        overflows && (self.parameters == Params::Fixed || self.optimizer.takes_groups())
    }

    /// How the run is saved and resumed. True: each rank writes its own checkpoint in the background, and loads it
    /// after the model is wrapped. False: rank 0 writes, not in the background, and ranks load before the wrapping.
    pub fn saves_each_its_own(&self) -> bool {
        self.ranks == Ranks::Views || (self.ranks == Ranks::Alone && self.data == Data::Plain)
    }

    pub fn name(&self) -> String {
        let names = self.numbers().into_iter().zip(PARTS).map(|(number, (_, names))| names[number]);
        names.collect::<Vec<_>>().join(" + ")
    }
}

/// Every cell.
pub fn full_product() -> Vec<Cell> {
    let total: usize = PARTS.iter().map(|(_, names)| names.len()).product();
    let cell = |mut number: usize| {
        let digit = |(_, names): &(&str, &[&str])| {
            let digit = number % names.len();
            number /= names.len();
            digit
        };
        Cell::of(&PARTS.iter().map(digit).collect::<Vec<_>>())
    };
    (0..total).map(cell).filter(Cell::is_program).collect()
}

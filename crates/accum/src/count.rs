//! What a mean loss is over.

/// How much a micro-batch's mean loss is the mean over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// The mean over so many samples: `inputs.size()[0]`.
    Samples(i64),
    /// The mean over so many tokens, those that are padded or masked left out.
    Tokens(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Samples,
    Tokens,
}

impl Count {
    pub(crate) fn parts(self) -> (Unit, i64) {
        match self {
            Self::Samples(count) => (Unit::Samples, count),
            Self::Tokens(count) => (Unit::Tokens, count),
        }
    }
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Tokens => "tokens",
        }
    }
}

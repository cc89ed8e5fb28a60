//! The number of samples or tokens that a mean loss averages over.

/// The number of samples or tokens that a micro-batch's mean loss averages over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// The loss is the mean over this many samples: `inputs.size()[0]`.
    Samples(i64),
    /// The loss is the mean over this many tokens, not counting padded and masked ones.
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

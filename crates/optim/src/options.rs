//! Declaring the options of an algorithm, each of them once.

use std::ops::Range;

use overdrive_core::OptimizerError;

use crate::algorithm::Field;

/// The options of a parameter group, as they are checked, saved and loaded.
pub trait OptionSet {
    /// An error when an option is out of its range, whatever the others are.
    fn check_ranges(&self) -> Result<(), OptimizerError>;

    /// The options under PyTorch's names, to save and load them.
    fn fields(&mut self) -> Vec<(String, Field<'_>)>;
}

/// A type of options.
pub(crate) trait Value {
    /// What is saved of it, under its name.
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)>;
}

impl Value for f64 {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Float(self))]
    }
}

impl Value for bool {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Bool(self))]
    }
}

impl Value for i64 {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Int(self))]
    }
}

impl Value for Option<f64> {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Optional(self))]
    }
}

impl<A: Value, B: Value> Value for (A, B) {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        let mut fields = self.0.fields(&format!("{name}.0"));
        fields.extend(self.1.fields(&format!("{name}.1")));
        fields
    }
}

impl<A: Value, B: Value, C: Value> Value for (A, B, C) {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        let mut fields = self.0.fields(&format!("{name}.0"));
        fields.extend(self.1.fields(&format!("{name}.1")));
        fields.extend(self.2.fields(&format!("{name}.2")));
        fields
    }
}

/// Where the numbers of an option have to be, and how an error says it.
pub(crate) type Limits = (Range<f64>, &'static str);

/// For decay rates of averages.
pub(crate) const BETA: Limits = (0.0..1.0, "at least 0 and below 1");
pub(crate) const NOT_NEGATIVE: Limits = (0.0..f64::INFINITY, "a finite number of at least 0");

/// An error unless the numbers of an option are within its limits, if it has any. The error calls them by the names of
/// the option's parts, if there are any, else by the option's.
pub(crate) fn check(
    (option, parts): (&'static str, &[&'static str]),
    fields: Vec<(String, Field<'_>)>,
    limits: Option<Limits>,
) -> Result<(), OptimizerError> {
    let Some((range, expected)) = limits else { return Ok(()) };
    for (place, (_, field)) in fields.into_iter().enumerate() {
        let found = match field {
            Field::Float(found) | Field::Optional(Some(found)) => *found,
            Field::Int(found) => *found as f64,
            _ => continue,
        };
        OptimizerError::check_range(parts.get(place).unwrap_or(&option), found, range.clone(), expected)?;
    }
    Ok(())
}

/// Defines the options of an algorithm: the struct, its `Default`, a setter for each on [`Options`](crate::Options),
/// and [`OptionSet`].
///
/// An option is `name: type = default, limits;`, the limits only where there are some. One of several parts is
/// `name(part: type, ..) = (default, ..), limits;`: its setter takes the parts, and it is saved as `name.0` and so on.
/// What is marked `#[no_setter]` has a setter that is written by hand, or none.
macro_rules! options {
    (@setter #[no_setter] $($option:tt)+) => {};
    (@setter $(#$doc:tt)+ $option:ident: $type:ty) => {
        options!(@setter $(#$doc)+ $option($option: $type));
    };
    (@setter $(#$doc:tt)+ $option:ident($($part:ident: $type:ty),+)) => {
        $(#$doc)+
        pub fn $option(self, $($part: $type),+) -> Self {
            self.with(move |options| options.$option = ($($part),+))
        }
    };
    ($(#$doc:tt)+ $name:ident {
        $(
            $(#$about:tt)+
            $option:ident $(($($part:ident: $part_type:ty),+))? $(: $type:ty)? = $default:expr $(, $limits:expr)?;
        )+
    }) => {
        $(#$doc)+
        #[derive(Clone, Debug)]
        pub struct $name {
            $(pub(crate) $option: $(($($part_type),+))? $($type)?,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($option: $default,)+ }
            }
        }

        impl<Scope> crate::builder::Options<$name, Scope> {
            $(options!(@setter $(#$about)+ $option $(($($part: $part_type),+))? $(: $type)?);)+
        }

        impl crate::options::OptionSet for $name {
            fn check_ranges(&self) -> Result<(), overdrive_core::OptimizerError> {
                use crate::options::{Value, check};
                let mut own = self.clone();
                $(check(
                    (stringify!($option), &[$($(stringify!($part)),+)?]),
                    own.$option.fields(stringify!($option)),
                    [$($limits)?].into_iter().next(),
                )?;)+
                Ok(())
            }

            fn fields(&mut self) -> Vec<(String, crate::algorithm::Field<'_>)> {
                use crate::options::Value;
                let fields = [$(self.$option.fields(stringify!($option))),+];
                fields.into_iter().flatten().collect()
            }
        }
    };
}

pub(crate) use options;

//! Labels that an image's changes leave as they are, and structures of labels.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;

use tch::Tensor;

use super::{Target, TargetPart};
use crate::tuples::for_tuples;

macro_rules! unchanged {
    ($($label:ty),*) => {$(
        impl Target for $label {
            fn visit(&mut self, _: &mut dyn FnMut(TargetPart<'_>)) {}
        }
    )*};
}

// Of the integers `i64` alone, which a label that is written as `0` then is: PyTorch's losses take no other.
unchanged!((), bool, i64, f32, f64, String, Arc<str>, Tensor);

macro_rules! each_part {
    ($($part:ident $index:tt),+) => {
        impl<$($part: Target),+> Target for ($($part,)+) {
            fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
                $(self.$index.visit(visit);)+
            }
        }
    };
}

for_tuples!(each_part);

impl<T: Target> Target for Option<T> {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.iter_mut().for_each(|target| target.visit(visit));
    }
}

impl<T: Target> Target for Vec<T> {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.iter_mut().for_each(|target| target.visit(visit));
    }
}

impl<T: Target, const N: usize> Target for [T; N] {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.iter_mut().for_each(|target| target.visit(visit));
    }
}

impl<K: Ord + Send, T: Target> Target for BTreeMap<K, T> {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.values_mut().for_each(|target| target.visit(visit));
    }
}

impl<K: Send, T: Target, H: BuildHasher + Send> Target for HashMap<K, T, H> {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.values_mut().for_each(|target| target.visit(visit));
    }
}

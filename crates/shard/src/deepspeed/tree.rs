//! A JSON document whose keys are given once, and its values by their paths.

use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::DeepSpeedError;

/// The largest whole number that a float holds exactly.
const LARGEST_WHOLE: f64 = (1u64 << 53) as f64;

/// A document, which is an object.
#[derive(Clone, Debug)]
pub(super) struct Tree(Map<String, Value>);

impl Tree {
    pub(super) fn parse(text: &str) -> Result<Self, DeepSpeedError> {
        let mut document = serde_json::Deserializer::from_str(text);
        let root = At(String::new()).deserialize(&mut document)?;
        document.end()?;
        match root {
            Value::Object(root) => Ok(Self(root)),
            other => Err(wrong("the document", &other, "an object")),
        }
    }

    pub(super) fn root(&self) -> &Map<String, Value> {
        &self.0
    }

    /// The value at a path. A null is none, as in DeepSpeed.
    pub(super) fn at(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        let first = self.0.get(names.next()?)?;
        names.try_fold(first, |value, name| value.as_object()?.get(name)).filter(|value| !value.is_null())
    }

    /// Sets the value at a path, and makes the objects above it.
    pub(super) fn set(&mut self, path: &str, new: Value) {
        if let Some((above, name)) = self.above(path) {
            above.insert(name.to_owned(), new);
        }
    }

    pub(super) fn remove(&mut self, path: &str) -> Option<Value> {
        let (above, name) = self.above(path)?;
        above.remove(name)
    }

    /// The object that has the last name of a path. `None` below what is not an object.
    fn above<'a, 'p>(&'a mut self, path: &'p str) -> Option<(&'a mut Map<String, Value>, &'p str)> {
        let (above, name) = path.rsplit_once('.').map_or((None, path), |(above, name)| (Some(above), name));
        let mut object = &mut self.0;
        for part in above.into_iter().flat_map(|above| above.split('.')) {
            let next = object.entry(part).or_insert_with(|| Value::Object(Map::new()));
            object = next.as_object_mut()?;
        }
        Some((object, name))
    }

    pub(super) fn is_auto(&self, path: &str) -> bool {
        self.at(path).is_some_and(is_auto)
    }

    pub(super) fn flag(&self, path: &str) -> Result<Option<bool>, DeepSpeedError> {
        self.read(path, "true or false", Value::as_bool)
    }

    pub(super) fn number(&self, path: &str) -> Result<Option<f64>, DeepSpeedError> {
        self.read(path, "a number", Value::as_f64)
    }

    /// A number of at least 0.
    pub(super) fn size(&self, path: &str) -> Result<Option<f64>, DeepSpeedError> {
        self.read(path, "a number of at least 0", |value| value.as_f64().filter(|it| *it >= 0.0))
    }

    /// A whole number of at least `least`, also as `5e8`.
    pub(super) fn count(&self, path: &str, least: u64) -> Result<Option<u64>, DeepSpeedError> {
        let expected = format!("a whole number of at least {least}");
        self.read(path, &expected, |value| whole(value).filter(|it| *it >= least))
    }

    pub(super) fn text(&self, path: &str) -> Result<Option<&str>, DeepSpeedError> {
        let Some(value) = self.at(path) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| wrong(path, value, "a text"))
    }

    /// A number as a list of one, or a list of numbers.
    pub(super) fn numbers(&self, path: &str, expected: &str) -> Result<Option<Vec<f64>>, DeepSpeedError> {
        self.read(path, expected, |value| match value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect(),
            one => one.as_f64().map(|one| vec![one]),
        })
    }

    fn read<T>(
        &self,
        path: &str,
        expected: &str,
        as_type: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, DeepSpeedError> {
        let Some(value) = self.at(path) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| wrong(path, value, expected))
    }
}

pub(super) fn is_auto(value: &Value) -> bool {
    value.as_str() == Some("auto")
}

fn whole(value: &Value) -> Option<u64> {
    let is_whole = |it: &f64| it.fract() == 0.0 && (0.0..=LARGEST_WHOLE).contains(it);
    value.as_u64().or_else(|| value.as_f64().filter(is_whole).map(|it| it as u64))
}

/// The error of a value that is not what it should be.
pub(super) fn wrong(path: &str, found: &Value, expected: &str) -> DeepSpeedError {
    let hint = if is_auto(found) { " (\"auto\" has no meaning here)" } else { "" };
    DeepSpeedError::Value { key: path.to_owned(), found: shown(found), expected: format!("{expected}{hint}") }
}

/// A value in an error message.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(list) if list.len() > 8 => format!("a list of {}", list.len()),
        other => other.to_string(),
    }
}

pub(super) fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Reads a value at a path.
struct At(String);

impl<'de> DeserializeSeed<'de> for At {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, document: D) -> Result<Value, D::Error> {
        document.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for At {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom(format!("`{}` is not finite", self.0)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(At(format!("{}[{}]", self.0, values.len())))? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let path = joined(&self.0, &name);
            let value = map.next_value_seed(At(path.clone()))?;
            if object.insert(name, value).is_some() {
                return Err(A::Error::custom(format!("`{path}` is given twice")));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Tree::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn values_are_read_by_their_paths_and_nulls_are_none() {
        let tree = Tree::parse(r#"{"a": {"b": 5e8, "c": null, "d": [1, 2.5], "e": "auto"}, "f": true}"#).unwrap();
        assert_eq!(tree.count("a.b", 1).unwrap(), Some(500_000_000));
        assert_eq!(tree.number("a.c").unwrap(), None);
        assert_eq!(tree.numbers("a.d", "numbers").unwrap(), Some(vec![1.0, 2.5]));
        assert_eq!(tree.numbers("a.b", "numbers").unwrap(), Some(vec![5e8]));
        assert_eq!(tree.flag("f").unwrap(), Some(true));
        assert_eq!(tree.text("f.g").unwrap(), None);
        assert!(tree.is_auto("a.e") && !tree.is_auto("a.b"));
    }

    #[test]
    fn values_of_other_types_are_named_by_their_path() {
        let tree = Tree::parse(r#"{"a": {"b": 1.5, "c": -2, "d": "auto", "e": {}}}"#).unwrap();
        let told = |error: DeepSpeedError| error.to_string();
        assert_eq!(told(tree.count("a.b", 1).unwrap_err()), "`a.b` is 1.5, but should be a whole number of at least 1");
        assert_eq!(told(tree.size("a.c").unwrap_err()), "`a.c` is -2, but should be a number of at least 0");
        assert_eq!(
            told(tree.flag("a.d").unwrap_err()),
            "`a.d` is \"auto\", but should be true or false (\"auto\" has no meaning here)"
        );
        assert_eq!(told(tree.text("a.e").unwrap_err()), "`a.e` is an object, but should be a text");
    }

    #[test]
    fn a_key_that_is_given_twice_is_named_with_its_line() {
        let told = refused("{\"fp16\": {\n\"enabled\": true,\n\"enabled\": false}}");
        assert!(told.contains("`fp16.enabled` is given twice at line 3"), "{told}");
    }

    #[test]
    fn what_is_not_an_object_in_json_is_refused() {
        for text in ["", "{", "{} {}", "{\"a\": 1,}", "{// comment\n}", "[1, 2, 3", "{\"a\": 1e999}", "{\"a\": NaN}"] {
            assert!(refused(text).starts_with("not a DeepSpeed configuration in JSON: "), "{text}");
        }
        assert_eq!(refused("[1]"), "`the document` is [1], but should be an object");
    }

    #[test]
    fn values_are_set_and_removed_by_their_paths() {
        let mut tree = Tree::parse(r#"{"a": {"b": 1}, "c": 2}"#).unwrap();
        tree.set("a.d", 3.into());
        tree.set("e.f", 4.into());
        tree.set("c.g", 5.into());
        assert_eq!(tree.remove("a.b"), Some(1.into()));
        assert_eq!(tree.remove("a.b"), None);
        assert_eq!(Value::Object(tree.0), serde_json::json!({"a": {"d": 3}, "c": 2, "e": {"f": 4}}));
    }
}

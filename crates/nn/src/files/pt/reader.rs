//! The machine that a pickle is a program for: a stack, a memo, and containers that are filled.

use std::collections::HashMap;
use std::rc::Rc;

use super::super::Bad;
use super::damaged;
use super::pickle::{Global, Holds, StorageParts, TensorParts, Value};

pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    /// What [`Value::Shared`] refers to.
    containers: Vec<Value>,
    holds: Holds,
}

impl<'a> Reader<'a> {
    /// Reads one pickle; returns its value, whose containers are in the reader.
    pub fn read(bytes: &'a [u8], holds: Holds) -> Result<(Value, Self), Bad> {
        let (stack, memo, containers) = (Vec::new(), HashMap::new(), Vec::new());
        let mut reader = Self { bytes, at: 0, stack, memo, containers, holds };
        // Ends, because each operation takes at least one byte.
        while !reader.step()? {}
        Ok((reader.pop()?, reader))
    }

    /// How many bytes were read.
    pub fn at(&self) -> usize {
        self.at
    }

    pub fn into_containers(self) -> Vec<Value> {
        self.containers
    }

    /// Does one operation. Returns whether it was the last.
    fn step(&mut self) -> Result<bool, Bad> {
        let operation = self.take(1)?[0];
        match operation {
            b'.' => return Ok(true),
            // The protocol's number, and the length of what follows.
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'(' => self.stack.push(Value::Mark),
            b'0' => drop(self.pop()?),
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.remember_or_recall(operation)?,
            b'c' => {
                let name = format!("{}.{}", self.line()?, self.line()?);
                self.stack.push(Value::named(&name, self.holds)?);
            }
            0x93 => match (self.pop()?, self.pop()?) {
                (Value::Text(name), Value::Text(module)) => {
                    self.stack.push(Value::named(&format!("{module}.{name}"), self.holds)?);
                }
                _ => return damaged("it holds a class without a name"),
            },
            b'Q' => self.storage()?,
            b'R' | 0x81 => self.call()?,
            b'b' => self.set_state()?,
            b']' | b'}' | b')' | b't' | 0x85..=0x87 | b'l' | b'd' => self.make_container(operation)?,
            b'a' | b'e' | b's' | b'u' => self.fill_container(operation)?,
            _ => {
                let value = self.plain(operation)?;
                self.stack.push(value);
            }
        }
        Ok(false)
    }

    fn plain(&mut self, operation: u8) -> Result<Value, Bad> {
        Ok(match operation {
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int(i32::from_le_bytes(self.array()?).into()),
            b'K' => Value::Int(self.take(1)?[0].into()),
            b'M' => Value::Int(u16::from_le_bytes(self.array()?).into()),
            0x8a => self.long()?,
            b'G' => Value::Float(f64::from_be_bytes(self.array()?)),
            b'X' => self.text::<4>()?,
            0x8c => self.text::<1>()?,
            other => return Err(Bad::Refused(format!("the pickle operation {other:#04x}"))),
        })
    }

    fn make_container(&mut self, operation: u8) -> Result<(), Bad> {
        let container = match operation {
            b']' => Value::List(Vec::new()),
            b'}' => Value::Dict(Vec::new()),
            b')' => Value::Tuple(Vec::new()),
            b't' => Value::Tuple(self.since_mark()?),
            b'l' => Value::List(self.since_mark()?),
            b'd' => Value::Dict(pairs(self.since_mark()?)?),
            // Tuples of one, two and three.
            _ => {
                let from = self.stack.len().checked_sub(usize::from(operation - 0x84)).ok_or_else(empty)?;
                Value::Tuple(self.stack.split_off(from))
            }
        };
        self.share(container);
        Ok(())
    }

    fn fill_container(&mut self, operation: u8) -> Result<(), Bad> {
        let mut items = match operation {
            b'a' => vec![self.pop()?],
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                vec![key, value]
            }
            _ => self.since_mark()?,
        };
        let Some(Value::Shared(place)) = self.stack.last() else {
            return damaged("it holds items without a container");
        };
        match (&mut self.containers[*place], operation) {
            (Value::List(list), b'a' | b'e') => list.append(&mut items),
            (Value::Dict(dict), b's' | b'u') => dict.extend(pairs(items)?),
            _ => return damaged("it holds items for another kind of container"),
        }
        Ok(())
    }

    fn remember_or_recall(&mut self, operation: u8) -> Result<(), Bad> {
        let place = match operation {
            b'q' | b'h' => self.take(1)?[0].into(),
            b'r' | b'j' => u32::from_le_bytes(self.array()?),
            _ => u32::try_from(self.memo.len()).unwrap_or(u32::MAX),
        };
        if matches!(operation, b'h' | b'j') {
            let value = self.memo.get(&place).cloned();
            self.stack.push(value.ok_or_else(|| Bad::Damaged("it recalls a value that was not stored".to_owned()))?);
        } else {
            self.memo.insert(place, self.stack.last().cloned().ok_or_else(empty)?);
        }
        Ok(())
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Bad> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end)).ok_or_else(cut)?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Bad> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<&'a str, Bad> {
        let length = self.bytes[self.at..].iter().position(|byte| *byte == b'\n').ok_or_else(cut)?;
        let line = self.take(length + 1)?;
        std::str::from_utf8(&line[..length]).map_err(|_| Bad::Damaged("a name is not text".to_owned()))
    }

    /// A text whose length has `N` bytes.
    fn text<const N: usize>(&mut self) -> Result<Value, Bad> {
        let mut length = [0; 8];
        length[..N].copy_from_slice(self.take(N)?);
        let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
        let text = std::str::from_utf8(self.take(length)?);
        Ok(Value::Text(text.map_err(|_| Bad::Damaged("a text is not UTF-8".to_owned()))?.into()))
    }

    fn long(&mut self) -> Result<Value, Bad> {
        let length = usize::from(self.take(1)?[0]);
        let bytes = self.take(length)?;
        if length > 8 {
            return Err(Bad::Refused("a whole number of more than 64 bits".to_owned()));
        }
        let is_negative = bytes.last().is_some_and(|byte| *byte >= 0x80);
        let mut all = [if is_negative { 0xff } else { 0 }; 8];
        all[..length].copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(all)))
    }

    fn pop(&mut self) -> Result<Value, Bad> {
        self.stack.pop().ok_or_else(empty)
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, Bad> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark)).ok_or_else(empty)?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn share(&mut self, container: Value) {
        self.stack.push(Value::Shared(self.containers.len()));
        self.containers.push(container);
    }

    /// The items of a tuple.
    fn tuple(&self, value: &Value) -> Result<&[Value], Bad> {
        let container = if let Value::Shared(place) = value { self.containers.get(*place) } else { None };
        match container {
            Some(Value::Tuple(items)) => Ok(items),
            _ => damaged("it holds something in place of a tuple"),
        }
    }

    /// Gives an object its state: metadata of an OrderedDict, say, which is left out, or fields.
    fn set_state(&mut self) -> Result<(), Bad> {
        let state = self.pop()?;
        if self.holds == Holds::Tensors {
            return Ok(());
        }
        let fields = match &state {
            // Taken, not copied: an object that is its own state would double again and again. Python's objects do not share
            // their states.
            Value::Shared(place) => match self.containers.get_mut(*place) {
                Some(Value::Dict(fields)) => std::mem::take(fields),
                _ => vec![(Value::Text("state".into()), state.clone())],
            },
            _ => return damaged("it holds an object whose state is no container"),
        };
        let Some(Value::Shared(place)) = self.stack.last() else { return damaged("it holds a state of no object") };
        match &mut self.containers[*place] {
            Value::Dict(object) => object.extend(fields),
            _ => return damaged("it holds a state of no object"),
        }
        Ok(())
    }

    /// `('storage', torch.FloatStorage, '0', 'cpu', 12)`; legacy files have one more.
    fn storage(&mut self) -> Result<(), Bad> {
        let parts = self.pop()?;
        let [Value::Text(tag), Value::Kind(kind), Value::Text(key), _, Value::Int(elements), view @ ..] =
            self.tuple(&parts)?
        else {
            return damaged("it holds a reference to no storage");
        };
        if !matches!(view, [] | [Value::None]) {
            return Err(Bad::Refused("a view of a storage".to_owned()));
        }
        if &**tag != "storage" {
            return Err(Bad::Refused(format!("a reference to `{tag}`")));
        }
        let storage = StorageParts { kind: *kind, key: key.clone(), elements: *elements };
        self.stack.push(Value::Storage(Rc::new(storage)));
        Ok(())
    }

    /// Does what the function would do.
    fn call(&mut self) -> Result<(), Bad> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        if let Value::Class(_) = function {
            self.share(Value::Dict(vec![(Value::Text("arguments".into()), arguments)]));
            return Ok(());
        }
        if let Value::Other(name) = function {
            return Err(Bad::Refused(format!("`{name}`")));
        }
        let Value::Global(function) = function else { return damaged("it holds a call of no function") };
        let arguments = self.tuple(&arguments)?;
        let value = match (function, arguments) {
            (Global::OrderedDict, []) => {
                self.share(Value::Dict(Vec::new()));
                return Ok(());
            }
            (Global::RebuildTensor, arguments) => self.tensor(arguments)?,
            // Of data, whether it requires a gradient, and hooks.
            (Global::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => tensor.clone(),
            (Global::Size, [sizes @ Value::Shared(_)]) => sizes.clone(),
            _ => return damaged(format!("it holds a call of `{function}` with other arguments")),
        };
        self.stack.push(value);
        Ok(())
    }

    /// Of storage, offset, size, stride, two about gradients, and whether its values are conjugated or negated lazily.
    fn tensor(&self, arguments: &[Value]) -> Result<Value, Bad> {
        let [Value::Storage(storage), Value::Int(offset), size, stride, more @ ..] = arguments else {
            return damaged("it holds a tensor without its parts");
        };
        if let Some(lazy) = more.get(2) {
            let lazy = if let Value::Shared(place) = lazy { self.containers.get(*place) } else { None };
            if !matches!(lazy, Some(Value::Dict(pairs)) if pairs.is_empty()) {
                return Err(Bad::Refused("a tensor that is conjugated or negated lazily".to_owned()));
            }
        }
        let number = |value: &Value| match value {
            Value::Int(number) => Ok(*number),
            _ => damaged("it holds a tensor whose size is not of numbers"),
        };
        let numbers = |tuple: &Value| match self.tuple(tuple)? {
            // libtorch's operators take no more; a long tuple could be used again and again.
            sizes if sizes.len() <= 64 => sizes.iter().map(number).collect::<Result<Vec<_>, _>>(),
            sizes => damaged(format!("it holds a tensor of {} dimensions", sizes.len())),
        };
        let (size, stride) = (numbers(size)?, numbers(stride)?);
        Ok(Value::Tensor(Rc::new(TensorParts { storage: storage.clone(), offset: *offset, size, stride })))
    }
}

/// Keys and values.
fn pairs(items: Vec<Value>) -> Result<Vec<(Value, Value)>, Bad> {
    if !items.len().is_multiple_of(2) {
        return damaged("it holds a key without a value");
    }
    let mut items = items.into_iter();
    Ok(std::iter::from_fn(|| items.next().zip(items.next())).collect())
}

fn empty() -> Bad {
    Bad::Damaged("it holds an operation without its operands".to_owned())
}

fn cut() -> Bad {
    Bad::Damaged("its pickle is cut off".to_owned())
}

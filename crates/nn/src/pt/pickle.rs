//! Reads the pickles of `torch.save` without running anything: plain containers and tensors are built, anything else is
//! refused by name.

use std::collections::HashMap;
use std::rc::Rc;

use super::PtError;

/// A value of a pickle.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Rc<str>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Tensor(Rc<TensorParts>),
    /// A reference to a tensor's memory: dtype, key and number of elements.
    Storage(Rc<StorageParts>),
    /// The name of a class or function.
    Global(Rc<str>),
    /// Where a container begins.
    Mark,
    /// A container that is still being filled, by its place in the list of those. So a container can be stored in the
    /// memo before it is filled, as pickle does.
    Shared(usize),
}

/// What a tensor is made of.
#[derive(Debug)]
pub(super) struct TensorParts {
    pub storage: Rc<StorageParts>,
    pub offset: i64,
    pub size: Vec<i64>,
    pub stride: Vec<i64>,
}

/// A tensor's memory.
#[derive(Debug)]
pub(super) struct StorageParts {
    /// `FloatStorage`, ..
    pub kind: Rc<str>,
    pub key: Rc<str>,
    pub elements: i64,
}

/// More values than any state dict has. A small pickle whose containers hold each other many times would be endless.
const MOST_VALUES: usize = 10_000_000;
/// Values may be nested so deep.
const DEEPEST: usize = 200;
/// More operations than any state dict has.
const MOST: usize = 50_000_000;

/// Reads one pickle from the beginning of `bytes`. Returns its value and its length.
pub(super) fn read(bytes: &[u8]) -> Result<(Value, usize), PtError> {
    let mut reader = Reader { bytes, at: 0, stack: Vec::new(), memo: HashMap::new(), filled: Vec::new() };
    for _ in 0..MOST {
        if reader.step()? {
            let value = reader.pop()?;
            let value = reader.resolve(value, 0, &mut MOST_VALUES.clone())?;
            return Ok((value, reader.at));
        }
    }
    Err(PtError::Damaged("its pickle does not end".to_owned()))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    /// The containers that values refer to.
    filled: Vec<Value>,
}

impl<'a> Reader<'a> {
    /// Does one operation. Returns whether it was the last.
    fn step(&mut self) -> Result<bool, PtError> {
        let operation = self.take(1)?[0];
        match operation {
            // PROTO, FRAME
            0x80 => _ = self.take(1)?,
            0x95 => _ = self.take(8)?,
            b'N' => self.stack.push(Value::None),
            0x88 => self.stack.push(Value::Bool(true)),
            0x89 => self.stack.push(Value::Bool(false)),
            b'J' => {
                let value = self.array::<4>().map(i32::from_le_bytes)?;
                self.stack.push(Value::Int(i64::from(value)));
            }
            b'K' => {
                let value = self.take(1)?[0];
                self.stack.push(Value::Int(i64::from(value)));
            }
            b'M' => {
                let value = self.array::<2>().map(u16::from_le_bytes)?;
                self.stack.push(Value::Int(i64::from(value)));
            }
            0x8a => self.long()?,
            b'G' => {
                let value = self.array::<8>().map(f64::from_be_bytes)?;
                self.stack.push(Value::Float(value));
            }
            b'X' => self.text::<4>()?,
            0x8c => self.text::<1>()?,
            b'c' => {
                let name = format!("{}.{}", self.line()?, self.line()?);
                self.stack.push(Value::Global(name.into()));
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (module, name) {
                    (Value::Text(module), Value::Text(name)) => {
                        self.stack.push(Value::Global(format!("{module}.{name}").into()));
                    }
                    _ => return damaged("a class without a name"),
                }
            }
            b'(' => self.stack.push(Value::Mark),
            b')' => self.stack.push(Value::Tuple(Vec::new())),
            b']' => self.share(Value::List(Vec::new())),
            b'}' => self.share(Value::Dict(Vec::new())),
            b't' => {
                let items = self.since_mark()?;
                self.stack.push(Value::Tuple(items));
            }
            0x85..=0x87 => {
                let count = usize::from(operation - 0x84);
                let from = self.stack.len().checked_sub(count).ok_or_else(empty)?;
                let items = self.stack.split_off(from);
                self.stack.push(Value::Tuple(items));
            }
            b'l' => {
                let items = self.since_mark()?;
                self.share(Value::List(items));
            }
            b'd' => {
                let items = self.since_mark()?;
                self.share(Value::Dict(Vec::new()));
                self.set(items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.since_mark()?;
                self.append(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![key, value])?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.set(items)?;
            }
            b'q' => {
                let index = self.take(1)?[0];
                self.remember(u32::from(index))?;
            }
            b'r' => {
                let index = self.array::<4>().map(u32::from_le_bytes)?;
                self.remember(index)?;
            }
            0x94 => {
                let index = u32::try_from(self.memo.len()).unwrap_or(u32::MAX);
                self.remember(index)?;
            }
            b'h' => {
                let index = self.take(1)?[0];
                self.recall(u32::from(index))?;
            }
            b'j' => {
                let index = self.array::<4>().map(u32::from_le_bytes)?;
                self.recall(index)?;
            }
            b'Q' => self.storage()?,
            b'R' | 0x81 => self.call()?,
            b'b' => {
                // The state of an object: metadata of an OrderedDict, say.
                self.pop()?;
            }
            b'0' => _ = self.pop()?,
            b'.' => return Ok(true),
            other => return Err(PtError::Refused(format!("the pickle operation {other:#04x}"))),
        }
        Ok(false)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], PtError> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| PtError::Damaged("its pickle is cut off".to_owned()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PtError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<&'a str, PtError> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|byte| *byte == b'\n');
        let length = length.ok_or_else(|| PtError::Damaged("its pickle is cut off".to_owned()))?;
        self.at += length + 1;
        std::str::from_utf8(&rest[..length]).map_err(|_| PtError::Damaged("a name is not text".to_owned()))
    }

    /// A text whose length has `N` bytes.
    fn text<const N: usize>(&mut self) -> Result<(), PtError> {
        let mut length = [0; 8];
        length[..N].copy_from_slice(self.take(N)?);
        let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
        let text = std::str::from_utf8(self.take(length)?);
        let text = text.map_err(|_| PtError::Damaged("a text is not UTF-8".to_owned()))?;
        self.stack.push(Value::Text(text.into()));
        Ok(())
    }

    /// An integer of up to eight bytes; legacy files begin with one of ten, which no state needs.
    fn long(&mut self) -> Result<(), PtError> {
        let length = usize::from(self.take(1)?[0]);
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|byte| *byte >= 0x80);
        let mut all = [if negative { 0xff } else { 0 }; 8];
        for (to, from) in all.iter_mut().zip(bytes) {
            *to = *from;
        }
        self.stack.push(Value::Int(i64::from_le_bytes(all)));
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PtError> {
        self.stack.pop().ok_or_else(empty)
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, PtError> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark)).ok_or_else(empty)?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    /// Pushes a container that may be filled later.
    fn share(&mut self, container: Value) {
        self.stack.push(Value::Shared(self.filled.len()));
        self.filled.push(container);
    }

    /// The container on top of the stack.
    fn top(&mut self) -> Result<&mut Value, PtError> {
        match self.stack.last() {
            Some(Value::Shared(index)) => Ok(&mut self.filled[*index]),
            _ => damaged("items without a container"),
        }
    }

    fn append(&mut self, items: Vec<Value>) -> Result<(), PtError> {
        match self.top()? {
            Value::List(list) => {
                list.extend(items);
                Ok(())
            }
            _ => damaged("items for something that is no list"),
        }
    }

    fn set(&mut self, items: Vec<Value>) -> Result<(), PtError> {
        if items.len() % 2 != 0 {
            return damaged("a key without a value");
        }
        let Value::Dict(dict) = self.top()? else { return damaged("keys for something that is no dict") };
        let mut items = items.into_iter();
        while let (Some(key), Some(value)) = (items.next(), items.next()) {
            dict.push((key, value));
        }
        Ok(())
    }

    fn remember(&mut self, index: u32) -> Result<(), PtError> {
        let value = self.stack.last().cloned().ok_or_else(empty)?;
        self.memo.insert(index, value);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<(), PtError> {
        let value = self.memo.get(&index).cloned();
        self.stack.push(value.ok_or_else(|| PtError::Damaged("a value that was not stored".to_owned()))?);
        Ok(())
    }

    /// `('storage', torch.FloatStorage, '0', 'cpu', 12)`; legacy files have one more.
    fn storage(&mut self) -> Result<(), PtError> {
        let Value::Tuple(parts) = self.pop()? else { return damaged("a reference to no storage") };
        let [Value::Text(tag), Value::Global(kind), Value::Text(key), _, Value::Int(elements), ..] = &parts[..] else {
            return damaged("a reference to no storage");
        };
        if &**tag != "storage" {
            return Err(PtError::Refused(format!("a reference to {tag:?}")));
        }
        let (kind, key, elements) = (kind.clone(), key.clone(), *elements);
        self.stack.push(Value::Storage(Rc::new(StorageParts { kind, key, elements })));
        Ok(())
    }

    /// Calls one of the functions that state dicts need; any other is refused.
    fn call(&mut self) -> Result<(), PtError> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Value::Tuple(arguments), Value::Global(name)) = (arguments, function) else {
            return damaged("a call of no function");
        };
        match &*name {
            "collections.OrderedDict" if arguments.is_empty() => self.share(Value::Dict(Vec::new())),
            "torch._utils._rebuild_tensor_v2" => {
                let tensor = self.tensor(&arguments)?;
                self.stack.push(tensor);
            }
            // Of data, whether it requires a gradient, and hooks.
            "torch._utils._rebuild_parameter" => match arguments.into_iter().next() {
                Some(tensor @ Value::Tensor(_)) => self.stack.push(tensor),
                _ => return damaged("a parameter without data"),
            },
            "torch.Size" => match arguments.into_iter().next() {
                Some(sizes @ Value::Tuple(_)) => self.stack.push(sizes),
                _ => return damaged("a size without numbers"),
            },
            _ => return Err(PtError::Refused(format!("a call of {name}"))),
        }
        Ok(())
    }

    /// Of storage, offset, size and stride; what follows is about gradients.
    fn tensor(&self, arguments: &[Value]) -> Result<Value, PtError> {
        let [Value::Storage(storage), Value::Int(offset), Value::Tuple(size), Value::Tuple(stride), ..] = arguments
        else {
            return damaged("a tensor without its parts");
        };
        let numbers = |values: &[Value]| {
            let number = |value: &Value| if let Value::Int(number) = value { Some(*number) } else { None };
            values.iter().map(number).collect::<Option<Vec<_>>>()
        };
        let (Some(size), Some(stride)) = (numbers(size), numbers(stride)) else {
            return damaged("a tensor's size without numbers");
        };
        Ok(Value::Tensor(Rc::new(TensorParts { storage: storage.clone(), offset: *offset, size, stride })))
    }

    /// The value with its containers in place of references to them. `left` counts the values down.
    fn resolve(&self, value: Value, depth: usize, left: &mut usize) -> Result<Value, PtError> {
        *left = left.checked_sub(1).ok_or_else(|| PtError::Damaged("it holds too many values".to_owned()))?;
        if depth > DEEPEST {
            return damaged("containers within containers without end");
        }
        Ok(match value {
            Value::Shared(index) => self.resolve(self.filled[index].clone(), depth + 1, left)?,
            Value::List(values) => Value::List(self.each(values, depth, left)?),
            Value::Tuple(values) => Value::Tuple(self.each(values, depth, left)?),
            Value::Dict(pairs) => {
                let mut resolved = Vec::new();
                for (key, value) in pairs {
                    resolved.push((self.resolve(key, depth + 1, left)?, self.resolve(value, depth + 1, left)?));
                }
                Value::Dict(resolved)
            }
            Value::Mark => return damaged("a mark in place of a value"),
            other => other,
        })
    }

    fn each(&self, values: Vec<Value>, depth: usize, left: &mut usize) -> Result<Vec<Value>, PtError> {
        values.into_iter().map(|value| self.resolve(value, depth + 1, left)).collect()
    }
}

fn empty() -> PtError {
    PtError::Damaged("an operation without its operands".to_owned())
}

fn damaged<T>(what: &str) -> Result<T, PtError> {
    Err(PtError::Damaged(format!("it holds {what}")))
}

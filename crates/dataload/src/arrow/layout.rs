//! The columns of a schema, and where their arrays are among all arrays of a record batch.

use arrow_schema::{DataType, Field as ArrowField, Schema, UnionMode};

use crate::columns::{Element, Field, FieldKind};

/// A column of values: a field of the schema, or one inside of its structures and lists.
#[derive(Clone, PartialEq)]
pub(super) struct Leaf {
    pub(super) field: Field,
    /// The arrays from the schema's field to the values; the last one's are the values.
    pub(super) steps: Vec<Step>,
    /// Whether all rows have the same number of values, each of the same size.
    pub(super) is_flat: bool,
}

/// One array on the way from a field to its values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) kind: StepKind,
    /// Its number among the children of the array before, or among the batch's columns.
    pub(super) child: usize,
    /// Its number among all arrays, depth first.
    pub(super) node: usize,
    /// The number of its first buffer among those of all arrays, the variable ones left out.
    pub(super) buffer: usize,
    /// How many arrays of views come before it, which have a variable number of buffers each.
    pub(super) views: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum StepKind {
    Struct,
    /// Lists with offsets, of 64 bits where `wide`.
    List {
        wide: bool,
    },
    /// Lists of this length.
    FixedList(usize),
    Values(Stored),
    /// The name of a type that is not read.
    Unsupported(String),
}

impl StepKind {
    /// How many buffers such an array has, with that of the bits and without the variable ones of views.
    pub(super) fn buffers(&self) -> usize {
        match self {
            Self::Struct | Self::FixedList(_) => 1,
            Self::Values(Stored::Texts { .. }) => 3,
            Self::List { .. } | Self::Values(_) => 2,
            Self::Unsupported(_) => 0,
        }
    }

    /// The least bits that an element takes in the array's first buffer, that of the bits left out; `None` where it has
    /// no buffers of its own.
    pub(super) fn least_bits(&self) -> Option<usize> {
        Some(match self {
            Self::List { wide } | Self::Values(Stored::Texts { wide }) => {
                if *wide {
                    64
                } else {
                    32
                }
            }
            Self::Values(Stored::Plain(Element::Bool)) => 1,
            Self::Values(Stored::Plain(Element::Uint16)) => 16,
            Self::Values(Stored::Plain(Element::Uint32)) => 32,
            Self::Values(Stored::Plain(element)) => element.bytes().saturating_mul(8),
            Self::Values(Stored::Views) => 128,
            Self::Values(Stored::Codes { bytes, .. }) => bytes * 8,
            Self::Struct | Self::FixedList(_) | Self::Unsupported(_) => return None,
        })
    }

    pub(super) fn is_views(&self) -> bool {
        matches!(self, Self::Values(Stored::Views))
    }
}

/// How values are stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stored {
    /// One after the other; bools as bits.
    Plain(Element),
    /// Bytes with offsets, of 64 bits where `wide`.
    Texts { wide: bool },
    /// 16 bytes for each, with the value itself or where it is.
    Views,
    /// The number of a value in a dictionary, in this many bytes.
    Codes { bytes: usize, signed: bool, values: Box<Stored> },
}

impl Stored {
    pub(super) fn element(&self) -> Element {
        match self {
            Self::Plain(element) => *element,
            Self::Texts { .. } | Self::Views => Element::Bytes,
            Self::Codes { values, .. } => values.element(),
        }
    }

    /// How values of a type are stored; the type's name where it has no [`Kind`](tch::Kind).
    fn of(data_type: &DataType) -> Result<Self, String> {
        let unsupported = || Err(data_type.to_string());
        Ok(Self::Plain(match data_type {
            DataType::Boolean => Element::Bool,
            DataType::Int8 => Element::Int8,
            DataType::Int16 => Element::Int16,
            DataType::Int32 | DataType::Date32 | DataType::Time32(_) => Element::Int32,
            DataType::Int64
            | DataType::Date64
            | DataType::Time64(_)
            | DataType::Timestamp(..)
            | DataType::Duration(_) => Element::Int64,
            DataType::UInt8 => Element::Uint8,
            DataType::UInt16 => Element::Uint16,
            DataType::UInt32 => Element::Uint32,
            DataType::Float16 => Element::Half,
            DataType::Float32 => Element::Float,
            DataType::Float64 => Element::Double,
            DataType::FixedSizeBinary(bytes) if *bytes > 0 => Element::Fixed(*bytes as usize),
            DataType::Utf8 | DataType::Binary => return Ok(Self::Texts { wide: false }),
            DataType::LargeUtf8 | DataType::LargeBinary => return Ok(Self::Texts { wide: true }),
            DataType::Utf8View | DataType::BinaryView => return Ok(Self::Views),
            DataType::Dictionary(index, values) => {
                let (bytes, signed) = match **index {
                    DataType::Int8 => (1, true),
                    DataType::Int16 => (2, true),
                    DataType::Int32 => (4, true),
                    DataType::Int64 => (8, true),
                    DataType::UInt8 => (1, false),
                    DataType::UInt16 => (2, false),
                    DataType::UInt32 => (4, false),
                    DataType::UInt64 => (8, false),
                    _ => return unsupported(),
                };
                let values = match Self::of(values) {
                    Ok(Self::Codes { .. }) | Err(_) => return unsupported(),
                    Ok(values) => Box::new(values),
                };
                return Ok(Self::Codes { bytes, signed, values });
            }
            _ => return unsupported(),
        }))
    }
}

impl Leaf {
    /// How the values are stored; `None` where their type is not read.
    pub(super) fn stored(&self) -> Option<&Stored> {
        match self.steps.last().map(|step| &step.kind) {
            Some(StepKind::Values(stored)) => Some(stored),
            _ => None,
        }
    }

    /// The array of a dictionary's values: alone in its batch.
    pub(super) fn of_dictionary(&self) -> Option<Self> {
        let Some(Stored::Codes { values, .. }) = self.stored() else { return None };
        let kind = StepKind::Values((**values).clone());
        let steps = vec![Step { kind, child: 0, node: 0, buffer: 0, views: 0 }];
        Some(Self { field: self.field.clone(), steps, is_flat: values.element() != Element::Bytes })
    }
}

/// Every column of a schema, in order.
pub(super) fn leaves(schema: &Schema) -> Vec<Leaf> {
    let mut layout = Layout::default();
    for (child, field) in schema.fields().iter().enumerate() {
        layout.visit(field, child, &Above::default(), field.name());
    }
    layout.leaves
}

/// Counts arrays and buffers as they come in a record batch.
#[derive(Default)]
struct Layout {
    leaves: Vec<Leaf>,
    nodes: usize,
    buffers: usize,
    views: usize,
}

/// The arrays that a field is in.
#[derive(Clone, Default)]
struct Above {
    steps: Vec<Step>,
    nullable: bool,
}

impl Layout {
    fn visit(&mut self, field: &ArrowField, child: usize, above: &Above, name: &str) {
        let mut here = above.clone();
        here.nullable |= field.is_nullable();
        let kind = step_of(field.data_type());
        here.steps.push(Step { kind, child, node: self.nodes, buffer: self.buffers, views: self.views });
        self.nodes += 1;
        self.buffers += buffers(field.data_type());
        self.views += usize::from(matches!(field.data_type(), DataType::Utf8View | DataType::BinaryView));
        match field.data_type() {
            DataType::Struct(fields) => {
                for (child, field) in fields.iter().enumerate() {
                    self.visit(field, child, &here, &format!("{name}.{}", field.name()));
                }
            }
            DataType::List(element) | DataType::LargeList(element) | DataType::FixedSizeList(element, _)
                if matches!(here.kind(), StepKind::List { .. } | StepKind::FixedList(_)) =>
            {
                self.visit(element, 0, &here, name);
            }
            DataType::Map(entries, _) => self.visit_map(entries, &here, name),
            other => {
                self.leaves.push(here.clone().leaf(name));
                // The arrays below are counted, and not read.
                let read = self.leaves.len();
                for (child, field) in children(other).into_iter().enumerate() {
                    self.visit(field, child, &here, name);
                }
                self.leaves.truncate(read);
            }
        }
    }

    /// A map is a list of structures, whose fields may have any name.
    fn visit_map(&mut self, entries: &ArrowField, above: &Above, name: &str) {
        let DataType::Struct(fields) = entries.data_type() else {
            return self.visit(entries, 0, above, name);
        };
        let mut here = above.clone();
        let kind = StepKind::Struct;
        here.steps.push(Step { kind, child: 0, node: self.nodes, buffer: self.buffers, views: self.views });
        self.nodes += 1;
        self.buffers += buffers(entries.data_type());
        for (child, (field, part)) in fields.iter().zip(["key", "value"]).enumerate() {
            self.visit(field, child, &here, &format!("{name}.{part}"));
        }
    }
}

impl Above {
    fn kind(&self) -> &StepKind {
        self.steps.last().map_or(&StepKind::Struct, |step| &step.kind)
    }

    fn leaf(self, name: &str) -> Leaf {
        let is_fixed = |step: &Step| matches!(step.kind, StepKind::FixedList(_));
        let (stored, kind) = match self.kind() {
            StepKind::Values(stored) => (Some(stored), kind_of(stored)),
            StepKind::Unsupported(found) => (None, FieldKind::Unsupported(found.clone())),
            other => (None, FieldKind::Unsupported(format!("{other:?}"))),
        };
        let in_lists = self.steps.iter().any(|step| matches!(step.kind, StepKind::List { .. }));
        let is_flat = !in_lists
            && match stored.map(Stored::element) {
                None | Some(Element::Bytes) => false,
                // There is no shape for them but that of lists.
                Some(Element::Fixed(_)) => !self.steps.iter().any(is_fixed),
                Some(_) => true,
            };
        let is_list = |step: &&Step| matches!(step.kind, StepKind::List { .. }) || (!is_flat && is_fixed(step));
        let lists = self.steps.iter().filter(is_list).count();
        let field = Field { name: name.into(), kind, lists, nullable: self.nullable };
        Leaf { field, steps: self.steps, is_flat }
    }
}

fn kind_of(stored: &Stored) -> FieldKind {
    match stored.element() {
        Element::Bytes => FieldKind::Bytes,
        Element::Fixed(bytes) => FieldKind::FixedBytes(bytes),
        element => FieldKind::Number(element.kind()),
    }
}

fn step_of(data_type: &DataType) -> StepKind {
    match data_type {
        DataType::Struct(_) => StepKind::Struct,
        DataType::List(_) | DataType::Map(..) => StepKind::List { wide: false },
        DataType::LargeList(_) => StepKind::List { wide: true },
        DataType::FixedSizeList(_, length) if *length > 0 => StepKind::FixedList(*length as usize),
        other => Stored::of(other).map_or_else(StepKind::Unsupported, StepKind::Values),
    }
}

/// How many buffers an array has of its own, the variable ones of views left out.
fn buffers(data_type: &DataType) -> usize {
    match data_type {
        DataType::Null | DataType::RunEndEncoded(..) => 0,
        DataType::Struct(_) | DataType::FixedSizeList(..) | DataType::Union(_, UnionMode::Sparse) => 1,
        DataType::Utf8
        | DataType::Binary
        | DataType::LargeUtf8
        | DataType::LargeBinary
        | DataType::ListView(_)
        | DataType::LargeListView(_) => 3,
        _ => 2,
    }
}

/// The fields below one whose values are not read.
fn children(data_type: &DataType) -> Vec<&ArrowField> {
    match data_type {
        DataType::FixedSizeList(element, _) | DataType::ListView(element) | DataType::LargeListView(element) => {
            vec![&**element]
        }
        DataType::Union(fields, _) => fields.iter().map(|(_, field)| &**field).collect(),
        DataType::RunEndEncoded(ends, values) => vec![&**ends, &**values],
        _ => Vec::new(),
    }
}

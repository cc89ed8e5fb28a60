//! The columns of a schema, and the place of their arrays among all arrays of a record batch.

use arrow_schema::{DataType, Field as ArrowField, Schema, UnionMode};

use crate::columns::{self, Element, Field, FieldKind};

/// A column of values: a field of the schema, or one within its structures and lists.
#[derive(Clone, PartialEq)]
pub(super) struct Leaf {
    pub(super) field: Field,
    /// The arrays from the schema's field to the values, the outermost first. The last array has the values.
    pub(super) levels: Vec<Level>,
    /// Whether all rows have the same number of values, and all values the same size.
    pub(super) is_flat: bool,
}

/// One array on the way from a field to its values, one level of nesting.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Level {
    pub(super) kind: LevelKind,
    /// Its index among the children of the array around it, or among the columns of the batch.
    pub(super) child: usize,
    /// Its index among all arrays, depth first.
    pub(super) node: usize,
    /// The index of its first buffer among those of all arrays, not counting the buffers of views, whose number varies.
    pub(super) buffer: usize,
    /// How many arrays of views come before it.
    pub(super) views: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum LevelKind {
    Struct,
    /// Lists with offsets, which have 64 bits if `wide`.
    List {
        wide: bool,
    },
    /// Fixed-size lists of this length.
    FixedList(usize),
    Values(Stored),
    /// The name of a type that is not supported.
    Unsupported(String),
}

impl LevelKind {
    /// How many buffers such an array has: its validity bitmap too, but not the buffers of views, whose number varies.
    pub(super) fn buffers(&self) -> usize {
        match self {
            Self::Struct | Self::FixedList(_) => 1,
            Self::Values(Stored::Texts { .. }) => 3,
            Self::List { .. } | Self::Values(_) => 2,
            Self::Unsupported(_) => 0,
        }
    }

    /// The least number of bits that an element takes in the first buffer after the validity bitmap; `None` if there is
    /// no other buffer.
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
    /// Bytes with offsets, which have 64 bits if `wide`.
    Texts { wide: bool },
    /// A view of 16 bytes for each value, which has the value itself or says where it is.
    Views,
    /// Dictionary-encoded: the index of each value in the dictionary, in this many bytes.
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

    /// How values of a type are stored, or the type's name if it has no [`Kind`](tch::Kind).
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

impl columns::Leaf for Leaf {
    fn field(&self) -> &Field {
        &self.field
    }

    fn element(&self) -> Option<Element> {
        self.stored().map(Stored::element)
    }

    fn is_like(&self, other: &Self) -> bool {
        self.field.name() == other.field.name() && self.levels == other.levels
    }

    fn describe(&self) -> String {
        format!("{:?} of {:?}", self.field.name(), self.field.kind())
    }
}

impl Leaf {
    /// How the values are stored; `None` if their type is not supported.
    pub(super) fn stored(&self) -> Option<&Stored> {
        match self.levels.last().map(|level| &level.kind) {
            Some(LevelKind::Values(stored)) => Some(stored),
            _ => None,
        }
    }

    /// The layout of this column's dictionary, whose batch has no other array.
    pub(super) fn of_dictionary(&self) -> Option<Self> {
        let Some(Stored::Codes { values, .. }) = self.stored() else { return None };
        let kind = LevelKind::Values((**values).clone());
        let levels = vec![Level { kind, child: 0, node: 0, buffer: 0, views: 0 }];
        Some(Self { field: self.field.clone(), levels, is_flat: values.element() != Element::Bytes })
    }
}

/// The columns of a schema, in order.
pub(super) fn leaves(schema: &Schema) -> Vec<Leaf> {
    let mut layout = Layout::default();
    for (child, field) in schema.fields().iter().enumerate() {
        layout.visit(field, child, &Above::default(), field.name());
    }
    layout.leaves
}

/// Counts arrays and buffers in the order in which a record batch has them.
#[derive(Default)]
struct Layout {
    leaves: Vec<Leaf>,
    nodes: usize,
    buffers: usize,
    views: usize,
}

/// The arrays around a field.
#[derive(Clone, Default)]
struct Above {
    levels: Vec<Level>,
    nullable: bool,
}

impl Layout {
    fn visit(&mut self, field: &ArrowField, child: usize, above: &Above, name: &str) {
        let mut here = above.clone();
        here.nullable |= field.is_nullable();
        let kind = level_of(field.data_type());
        here.levels.push(Level { kind, child, node: self.nodes, buffer: self.buffers, views: self.views });
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
                if matches!(here.kind(), LevelKind::List { .. } | LevelKind::FixedList(_)) =>
            {
                self.visit(element, 0, &here, name);
            }
            DataType::Map(entries, _) => self.visit_map(entries, &here, name),
            other => {
                self.leaves.push(here.clone().leaf(name));
                // The arrays within are counted, but not read.
                let read = self.leaves.len();
                for (child, field) in children(other).into_iter().enumerate() {
                    self.visit(field, child, &here, name);
                }
                self.leaves.truncate(read);
            }
        }
    }

    /// A map is a list of structures of a key and a value, whose fields can have any name.
    fn visit_map(&mut self, entries: &ArrowField, above: &Above, name: &str) {
        let DataType::Struct(fields) = entries.data_type() else {
            return self.visit(entries, 0, above, name);
        };
        let mut here = above.clone();
        let kind = LevelKind::Struct;
        here.levels.push(Level { kind, child: 0, node: self.nodes, buffer: self.buffers, views: self.views });
        self.nodes += 1;
        self.buffers += buffers(entries.data_type());
        for (child, (field, part)) in fields.iter().zip(["key", "value"]).enumerate() {
            self.visit(field, child, &here, &format!("{name}.{part}"));
        }
    }
}

impl Above {
    fn kind(&self) -> &LevelKind {
        self.levels.last().map_or(&LevelKind::Struct, |level| &level.kind)
    }

    fn leaf(self, name: &str) -> Leaf {
        let is_fixed = |level: &Level| matches!(level.kind, LevelKind::FixedList(_));
        let (stored, kind) = match self.kind() {
            LevelKind::Values(stored) => (Some(stored), kind_of(stored)),
            LevelKind::Unsupported(found) => (None, FieldKind::Unsupported(found.clone())),
            other => (None, FieldKind::Unsupported(format!("{other:?}"))),
        };
        let in_lists = self.levels.iter().any(|level| matches!(level.kind, LevelKind::List { .. }));
        let is_flat = !in_lists
            && match stored.map(Stored::element) {
                None | Some(Element::Bytes) => false,
                // As values of fixed-size lists, they would need one more dimension than a tensor here has.
                Some(Element::Fixed(_)) => !self.levels.iter().any(is_fixed),
                Some(_) => true,
            };
        let is_list = |level: &&Level| matches!(level.kind, LevelKind::List { .. }) || (!is_flat && is_fixed(level));
        let lists = self.levels.iter().filter(is_list).count();
        let field = Field { name: name.into(), kind, lists, nullable: self.nullable };
        Leaf { field, levels: self.levels, is_flat }
    }
}

fn kind_of(stored: &Stored) -> FieldKind {
    match stored.element() {
        Element::Bytes => FieldKind::Bytes,
        Element::Fixed(bytes) => FieldKind::FixedBytes(bytes),
        element => FieldKind::Number(element.kind()),
    }
}

fn level_of(data_type: &DataType) -> LevelKind {
    match data_type {
        DataType::Struct(_) => LevelKind::Struct,
        DataType::List(_) | DataType::Map(..) => LevelKind::List { wide: false },
        DataType::LargeList(_) => LevelKind::List { wide: true },
        DataType::FixedSizeList(_, length) if *length > 0 => LevelKind::FixedList(*length as usize),
        other => Stored::of(other).map_or_else(LevelKind::Unsupported, LevelKind::Values),
    }
}

/// How many buffers an array has itself, without the buffers of views, whose number varies.
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

/// The fields within a field whose values are not read.
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

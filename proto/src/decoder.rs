//! Messages that carry tensors, read as they come from the socket, without a copy of the values.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use steadfast_common::error::ErrorKind;
use steadfast_common::pieces::Pieces;
use tonic::Status;

use crate::framing::{BLOCKS, DATA, HEADER, NUMBER, PREFIX};
use crate::{MESSAGE_BYTES_MAX, status};

/// The longest header.
const HEADER_BYTES_MAX: usize = 128 << 10;

/// Reads messages with tensors as they come, cut anywhere.
#[derive(Debug)]
pub struct Decoder<H> {
    state: State,
    /// Bytes that the present message still has.
    message: usize,
    /// Bytes that the present block still has.
    block: Option<usize>,
    header: Option<H>,
    /// Bytes of all its parts.
    header_bytes: usize,
    number: u32,
    data: Pieces,
}

/// What the next byte belongs to.
#[derive(Debug)]
enum State {
    Prefix(BytesMut),
    /// A number of any length, and what it is.
    Varint {
        value: u64,
        shift: u32,
        of: Of,
    },
    /// That many bytes are of no interest.
    Skip(usize),
    Header(usize, BytesMut),
    Data(usize),
}

/// What a number is.
#[derive(Clone, Copy, Debug)]
enum Of {
    Key,
    Len(Field),
    Number,
    Unknown,
}

/// A field with a length.
#[derive(Clone, Copy, Debug)]
enum Field {
    Header,
    Block,
    Data,
    Unknown,
}

impl<H> Default for Decoder<H> {
    fn default() -> Self {
        Self {
            state: State::Prefix(BytesMut::new()),
            message: 0,
            block: None,
            header: None,
            header_bytes: 0,
            number: 0,
            data: Pieces::default(),
        }
    }
}

impl<H: Message + Default> Decoder<H> {
    /// The header, once it has come.
    pub fn header(&self) -> Option<&H> {
        self.header.as_ref()
    }

    /// Reads what came next. `take` is given each block as soon as it is whole, with the header if
    /// that came before it.
    ///
    /// # Errors
    /// What `take` says, or that these are no such messages.
    pub fn feed(
        &mut self,
        mut bytes: Bytes,
        mut take: impl FnMut(Option<&H>, u32, Pieces) -> Result<(), Status>,
    ) -> Result<(), Status> {
        while !bytes.is_empty() {
            self.step(&mut bytes)?;
            // Whatever has no length is over at once.
            while let State::Skip(0) | State::Data(0) | State::Header(0, _) = self.state {
                self.finish_field()?;
            }
            if self.block == Some(0) && self.is_between_fields() {
                self.block = None;
                take(self.header.as_ref(), self.number, std::mem::take(&mut self.data))?;
            }
            if self.message == 0 && self.block.is_none() && self.is_between_fields() {
                self.state = State::Prefix(BytesMut::new());
            }
        }
        Ok(())
    }

    /// Says that nothing more comes.
    ///
    /// # Errors
    /// If a message is not whole.
    pub fn end(self) -> Result<Option<H>, Status> {
        match self.state {
            State::Prefix(prefix) if prefix.is_empty() => Ok(self.header),
            _ => Err(invalid("the last message is cut off")),
        }
    }

    fn is_between_fields(&self) -> bool {
        matches!(self.state, State::Varint { value: 0, shift: 0, of: Of::Key })
    }

    fn step(&mut self, bytes: &mut Bytes) -> Result<(), Status> {
        match &mut self.state {
            State::Prefix(prefix) => {
                let taken = bytes.split_to(bytes.len().min(PREFIX - prefix.len()));
                prefix.put(taken);
                if prefix.len() == PREFIX {
                    let (compressed, len) = (prefix.get_u8(), prefix.get_u32() as usize);
                    self.begin_message(compressed, len)?;
                }
                Ok(())
            }
            State::Varint { value, shift, of } => {
                let byte = bytes.get_u8();
                if 63 < *shift {
                    return Err(invalid("a number has too many bytes"));
                }
                *value |= u64::from(byte & 0x7f) << *shift;
                *shift += 7;
                let (value, of, is_whole) = (*value, *of, byte & 0x80 == 0);
                self.spend(1)?;
                if is_whole { self.take_number(of, value) } else { Ok(()) }
            }
            State::Skip(left) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                bytes.advance(taken);
                self.spend(taken)
            }
            State::Header(left, text) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                text.put(bytes.split_to(taken));
                self.spend(taken)
            }
            State::Data(left) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                self.data.push(bytes.split_to(taken));
                self.spend(taken)
            }
        }
    }

    fn begin_message(&mut self, compressed: u8, len: usize) -> Result<(), Status> {
        if compressed != 0 {
            return Err(Status::unimplemented("messages with tensors are not compressed"));
        }
        if MESSAGE_BYTES_MAX < len {
            let message = format!("a message of {len} bytes; {MESSAGE_BYTES_MAX} are the most");
            return Err(status(ErrorKind::TooLarge, message));
        }
        (self.message, self.state) = (len, KEY);
        Ok(())
    }

    fn take_number(&mut self, of: Of, value: u64) -> Result<(), Status> {
        self.state = match of {
            Of::Key => self.begin_field(value)?,
            Of::Number => {
                self.number = value as u32;
                KEY
            }
            Of::Unknown => KEY,
            Of::Len(field) => {
                let len = usize::try_from(value).unwrap_or(usize::MAX);
                if self.block.unwrap_or(self.message) < len {
                    return Err(invalid("a field is longer than its message"));
                }
                match field {
                    Field::Header => {
                        // One that comes in several parts is merged, and may not grow by that.
                        self.header_bytes = self.header_bytes.saturating_add(len);
                        if HEADER_BYTES_MAX < self.header_bytes {
                            return Err(status(ErrorKind::TooLarge, "the header is too long"));
                        }
                        State::Header(len, BytesMut::new())
                    }
                    Field::Block => {
                        (self.block, self.number) = (Some(len), 0);
                        self.data = Pieces::default();
                        KEY
                    }
                    Field::Data => {
                        self.data = Pieces::default();
                        State::Data(len)
                    }
                    Field::Unknown => State::Skip(len),
                }
            }
        };
        Ok(())
    }

    fn begin_field(&self, key: u64) -> Result<State, Status> {
        let (field, wire) = (u32::try_from(key >> 3).unwrap_or_default(), key & 7);
        let known = match (self.block, field, wire) {
            (None, HEADER, 2) => Some(Of::Len(Field::Header)),
            (None, BLOCKS, 2) => Some(Of::Len(Field::Block)),
            (Some(_), NUMBER, 0) => Some(Of::Number),
            (Some(_), DATA, 2) => Some(Of::Len(Field::Data)),
            _ => None,
        };
        Ok(match (known, wire) {
            (Some(of), _) => varint(of),
            (None, 0) => varint(Of::Unknown),
            (None, 1) => State::Skip(8),
            (None, 2) => varint(Of::Len(Field::Unknown)),
            (None, 5) => State::Skip(4),
            (None, _) => return Err(invalid("a field is of no known kind")),
        })
    }

    fn finish_field(&mut self) -> Result<(), Status> {
        if let State::Header(_, text) = std::mem::replace(&mut self.state, KEY) {
            let header = self.header.get_or_insert_default();
            header.merge(text.freeze()).map_err(|error| invalid(error.to_string()))?;
        }
        Ok(())
    }

    /// Counts bytes of the present message, and of its present block.
    fn spend(&mut self, bytes: usize) -> Result<(), Status> {
        let too_long = || invalid("a field is longer than its message");
        self.message = self.message.checked_sub(bytes).ok_or_else(too_long)?;
        if let Some(block) = &mut self.block {
            *block = block.checked_sub(bytes).ok_or_else(too_long)?;
        }
        Ok(())
    }
}

/// Between two fields.
const KEY: State = varint(Of::Key);

const fn varint(of: Of) -> State {
    State::Varint { value: 0, shift: 0, of }
}

fn invalid(message: impl Into<String>) -> Status {
    status(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::framing::{encode, framed};
    use crate::v1::push_header::Name;
    use crate::v1::{BlockData, LaneContribution, LaneShare, PushHeader, PushRequest};

    type Found = (Option<PushHeader>, Vec<(u32, Vec<u8>)>);

    /// Reads bytes that are cut at the given places.
    fn read(bytes: &[u8], cuts: &[prop::sample::Index]) -> Result<Found, Status> {
        let mut places: Vec<usize> = cuts.iter().map(|it| it.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        let (mut decoder, mut blocks) = (Decoder::<PushHeader>::default(), Vec::new());
        for ends in places.windows(2) {
            let piece = Bytes::copy_from_slice(&bytes[ends[0]..ends[1]]);
            decoder.feed(piece, |_, number, data| {
                let mut whole = Vec::new();
                data.iter().for_each(|piece| whole.extend_from_slice(piece));
                blocks.push((number, whole));
                Ok(())
            })?;
        }
        Ok((decoder.end()?, blocks))
    }

    fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
        vec(any::<prop::sample::Index>(), 0..6)
    }

    fn messages() -> impl Strategy<Value = Vec<PushRequest>> {
        let block = (any::<u32>(), vec(any::<u8>(), 0..40))
            .prop_map(|(block, data)| BlockData { block, data: data.into() });
        let header = (any::<u64>(), any::<f64>()).prop_map(|(records, loss_sum)| PushHeader {
            records,
            loss_sum: if loss_sum.is_nan() { 0.0 } else { loss_sum },
            ..PushHeader::default()
        });
        let rest = vec(vec(block.clone(), 0..4), 0..4);
        (header, vec(block, 0..4), rest).prop_map(|(header, blocks, rest)| {
            let first = PushRequest { header: Some(header), blocks };
            let rest = rest.into_iter().map(|blocks| PushRequest { header: None, blocks });
            [first].into_iter().chain(rest).collect()
        })
    }

    fn expected(messages: &[PushRequest]) -> Found {
        let blocks = messages.iter().flat_map(|it| &it.blocks);
        let blocks = blocks.map(|it| (it.block, it.data.to_vec())).collect();
        (messages[0].header.clone(), blocks)
    }

    proptest! {
        /// A client with any other gRPC library is understood.
        #[test]
        fn what_a_codec_writes_is_read_wherever_it_is_cut(messages in messages(), cuts in cuts()) {
            let bytes: Vec<u8> = messages.iter().flat_map(framed).collect();
            prop_assert_eq!(read(&bytes, &cuts).unwrap(), expected(&messages));
        }

        #[test]
        fn what_is_written_in_pieces_is_what_a_codec_writes(messages in messages()) {
            let mut pieces = Vec::new();
            for message in &messages {
                encode(message.header.as_ref(), &message.blocks, &mut pieces);
            }
            let mut bytes = Bytes::from(pieces.concat());
            for message in &messages {
                bytes.advance(1);
                let len = bytes.get_u32() as usize;
                let read = PushRequest::decode(bytes.split_to(len)).unwrap();
                prop_assert_eq!(&read, message);
            }
            prop_assert!(bytes.is_empty());
        }

        /// F48: a header in many parts is bounded as a whole.
        #[test]
        fn a_header_that_grows_part_by_part_is_refused(parts in 2_usize..6) {
            let shares = vec![LaneShare { records: 1, last: true, checksum: 1 }; HEADER_BYTES_MAX / 14 / parts];
            let name = LaneContribution { version: 1, lane: 0, shares };
            let header = PushHeader { name: Some(Name::Lanes(name)), ..PushHeader::default() };
            let part = framed(&PushRequest { header: Some(header), blocks: Vec::new() });
            let whole = |times: usize| read(&part.repeat(times), &[]);
            prop_assert!(whole(1).is_ok());
            let refused = whole(parts + 1).unwrap_err();
            prop_assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        }

        /// F46: whatever comes, it is read as a codec reads it, or refused.
        #[test]
        fn hostile_bytes_are_read_as_a_codec_reads_them_or_refused(
            bytes in vec(any::<u8>(), 0..60),
            cuts in cuts(),
        ) {
            let mut message = vec![0];
            message.extend((bytes.len() as u32).to_be_bytes());
            message.extend(&bytes);
            let found = read(&message, &cuts);
            if let (Ok((header, blocks)), Ok(known)) = (found, PushRequest::decode(&bytes[..])) {
                prop_assert_eq!(header, known.header);
                let known = known.blocks.into_iter().map(|it| (it.block, it.data.to_vec()));
                prop_assert_eq!(blocks, known.collect::<Vec<_>>());
            }
            let _ = read(&bytes, &cuts);
        }
    }

    /// F48: no job's own header is refused. One trainer may send the sum of all lanes, with what is counted
    /// of each.
    #[test]
    fn the_header_of_as_many_lanes_as_a_job_may_have_is_read() {
        let share = LaneShare { records: u32::MAX, last: true, checksum: u64::MAX };
        let shares = vec![share; steadfast_common::spec::LANES_MAX as usize];
        let name = LaneContribution { version: u64::MAX, lane: u32::MAX, shares };
        let header = PushHeader { name: Some(Name::Lanes(name)), ..PushHeader::default() };
        let message = PushRequest { header: Some(header), blocks: Vec::new() };
        assert_eq!(read(&framed(&message), &[]).unwrap(), expected(&[message]));
    }

    /// gRPC allows fields in any order, and such as are of a later version.
    #[test]
    fn fields_in_any_order_and_unknown_ones_are_taken_as_they_are() {
        let inner = [
            &[0x12, 2, 7, 8][..], // data, before the number
            &[0x78, 0x85, 0x01],  // field 15, a varint
            &[0x08, 5],           // number
        ]
        .concat();
        let message = [
            &[0x39, 1, 2, 3, 4, 5, 6, 7, 8][..], // field 7, eight bytes
            &[0x12, inner.len() as u8],
            &inner,
            &[0x2d, 1, 2, 3, 4],    // field 5, four bytes
            &[0x32, 3, 9, 9, 9],    // field 6, with a length
            &[0x0a, 2, 0x10, 0x2a], // header with 42 records
            &[0x12, 0],             // a block of nothing
        ]
        .concat();
        let mut bytes = vec![0];
        bytes.extend((message.len() as u32).to_be_bytes());
        bytes.extend(&message);
        let known = PushRequest::decode(&message[..]).unwrap();
        let found = read(&bytes, &[]).unwrap();
        assert_eq!(found, expected(&[known]));
        assert_eq!(found.0.unwrap().records, 42);
        assert_eq!(found.1, [(5, vec![7, 8]), (0, Vec::new())]);
    }

    #[test]
    fn a_compressed_a_huge_and_a_cut_off_message_are_refused() {
        let code = |bytes: &[u8]| read(bytes, &[]).unwrap_err().code();
        assert_eq!(code(&[1, 0, 0, 0, 0]), tonic::Code::Unimplemented);
        assert_eq!(code(&[0, 0xff, 0, 0, 0]), tonic::Code::ResourceExhausted);
        assert_eq!(code(&[0, 0, 0]), tonic::Code::InvalidArgument);
        assert_eq!(code(&[0, 0, 0, 0, 4, 0x12, 2, 0x12]), tonic::Code::InvalidArgument);
        // A block that is longer than its message.
        assert_eq!(code(&[0, 0, 0, 0, 2, 0x12, 9]), tonic::Code::InvalidArgument);
    }
}

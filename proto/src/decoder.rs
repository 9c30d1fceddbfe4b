//! Decodes messages with tensors incrementally from the socket, without copying the values.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use steadfast_common::error::ErrorKind;
use steadfast_common::tensor::byte_segments::ByteSegments;
use tonic::Status;

use crate::framing::{BLOCKS, DATA, HEADER, NUMBER, PREFIX};
use crate::{MESSAGE_BYTES_MAX, status};

/// The longest header that is accepted.
const HEADER_BYTES_MAX: usize = 128 << 10;

/// Decodes messages with tensors from segments of any size.
#[derive(Debug)]
pub struct Decoder<H> {
    state: State,
    /// Bytes left in the current message.
    message: usize,
    /// Bytes left in the current block.
    block: Option<usize>,
    header: Option<H>,
    /// Total size of the header's parts in bytes.
    header_bytes: usize,
    number: u32,
    data: ByteSegments,
}

/// The element that the next byte belongs to.
#[derive(Debug)]
enum State {
    Prefix(BytesMut),
    /// A varint and its meaning.
    Varint {
        value: u64,
        shift: u32,
        of: VarintKind,
    },
    /// Bytes of an unknown field, left to skip.
    Skip(usize),
    Header(usize, BytesMut),
    Data(usize),
}

/// The meaning of a varint.
#[derive(Clone, Copy, Debug)]
enum VarintKind {
    Key,
    Len(Field),
    Number,
    Unknown,
}

/// A length-delimited field.
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
            data: ByteSegments::default(),
        }
    }
}

impl<H: Message + Default> Decoder<H> {
    /// Returns the header, if it has arrived.
    pub fn header(&self) -> Option<&H> {
        self.header.as_ref()
    }

    /// Decodes the next bytes. Calls `take` with each complete block, and with the header if that came
    /// before it.
    ///
    /// # Errors
    /// The error of `take`, or an invalid message.
    pub fn feed(
        &mut self,
        mut bytes: Bytes,
        mut take: impl FnMut(Option<&H>, u32, ByteSegments) -> Result<(), Status>,
    ) -> Result<(), Status> {
        while !bytes.is_empty() {
            self.step(&mut bytes)?;
            // Fields of length zero are complete at once.
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

    /// Ends the stream and returns the header.
    ///
    /// # Errors
    /// If the last message is incomplete.
    pub fn end(self) -> Result<Option<H>, Status> {
        match self.state {
            State::Prefix(prefix) if prefix.is_empty() => Ok(self.header),
            _ => Err(invalid("the last message is truncated")),
        }
    }

    fn is_between_fields(&self) -> bool {
        matches!(self.state, State::Varint { value: 0, shift: 0, of: VarintKind::Key })
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
                let (value, of, is_complete) = (*value, *of, byte & 0x80 == 0);
                self.consume(1)?;
                if is_complete { self.take_number(of, value) } else { Ok(()) }
            }
            State::Skip(left) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                bytes.advance(taken);
                self.consume(taken)
            }
            State::Header(left, text) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                text.put(bytes.split_to(taken));
                self.consume(taken)
            }
            State::Data(left) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                self.data.push(bytes.split_to(taken));
                self.consume(taken)
            }
        }
    }

    fn begin_message(&mut self, compressed: u8, len: usize) -> Result<(), Status> {
        if compressed != 0 {
            return Err(Status::unimplemented("compressed messages are not supported"));
        }
        if MESSAGE_BYTES_MAX < len {
            let message = format!("a message has {len} bytes; the limit is {MESSAGE_BYTES_MAX}");
            return Err(status(ErrorKind::TooLarge, message));
        }
        (self.message, self.state) = (len, KEY);
        Ok(())
    }

    fn take_number(&mut self, of: VarintKind, value: u64) -> Result<(), Status> {
        self.state = match of {
            VarintKind::Key => self.begin_field(value)?,
            VarintKind::Number => {
                self.number = value as u32;
                KEY
            }
            VarintKind::Unknown => KEY,
            VarintKind::Len(field) => {
                let len = usize::try_from(value).unwrap_or(usize::MAX);
                if self.block.unwrap_or(self.message) < len {
                    return Err(invalid("a field is longer than its message"));
                }
                match field {
                    Field::Header => {
                        // The parts of a header are merged, so the limit applies to their sum.
                        self.header_bytes = self.header_bytes.saturating_add(len);
                        if HEADER_BYTES_MAX < self.header_bytes {
                            return Err(status(ErrorKind::TooLarge, "the header is too long"));
                        }
                        State::Header(len, BytesMut::new())
                    }
                    Field::Block => {
                        (self.block, self.number) = (Some(len), 0);
                        self.data = ByteSegments::default();
                        KEY
                    }
                    Field::Data => {
                        self.data = ByteSegments::default();
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
            (None, HEADER, 2) => Some(VarintKind::Len(Field::Header)),
            (None, BLOCKS, 2) => Some(VarintKind::Len(Field::Block)),
            (Some(_), NUMBER, 0) => Some(VarintKind::Number),
            (Some(_), DATA, 2) => Some(VarintKind::Len(Field::Data)),
            _ => None,
        };
        Ok(match (known, wire) {
            (Some(of), _) => varint(of),
            (None, 0) => varint(VarintKind::Unknown),
            (None, 1) => State::Skip(8),
            (None, 2) => varint(VarintKind::Len(Field::Unknown)),
            (None, 5) => State::Skip(4),
            (None, _) => return Err(invalid("a field has an unknown wire type")),
        })
    }

    fn finish_field(&mut self) -> Result<(), Status> {
        if let State::Header(_, text) = std::mem::replace(&mut self.state, KEY) {
            let header = self.header.get_or_insert_default();
            header.merge(text.freeze()).map_err(|error| invalid(error.to_string()))?;
        }
        Ok(())
    }

    /// Subtracts consumed bytes from the current message and block.
    fn consume(&mut self, bytes: usize) -> Result<(), Status> {
        let too_long = || invalid("a field is longer than its message");
        self.message = self.message.checked_sub(bytes).ok_or_else(too_long)?;
        if let Some(block) = &mut self.block {
            *block = block.checked_sub(bytes).ok_or_else(too_long)?;
        }
        Ok(())
    }
}

/// The state between two fields.
const KEY: State = varint(VarintKind::Key);

const fn varint(of: VarintKind) -> State {
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

    /// Decodes `bytes` in segments that end at `cuts`.
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
        /// Messages of any other gRPC library are accepted.
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

        /// F48: the size limit applies to all parts of a header together.
        #[test]
        fn a_header_that_grows_part_by_part_is_refused(parts in 2_usize..6) {
            let shares = vec![LaneShare { records: 1, last: true, checksum: 1, weight: None }; HEADER_BYTES_MAX / 14 / parts];
            let name = LaneContribution { version: 1, lane: 0, shares, reductions: 3 };
            let header = PushHeader { name: Some(Name::Lanes(name)), ..PushHeader::default() };
            let part = framed(&PushRequest { header: Some(header), blocks: Vec::new() });
            let whole = |times: usize| read(&part.repeat(times), &[]);
            prop_assert!(whole(1).is_ok());
            let refused = whole(parts + 1).unwrap_err();
            prop_assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        }

        /// F46: arbitrary bytes are decoded like by prost, or rejected.
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

    /// F48: the largest valid header is accepted. One trainer may send the sum of all lanes, with the share
    /// of each.
    #[test]
    fn the_header_of_as_many_lanes_as_a_job_may_have_is_read() {
        let share =
            LaneShare { records: u32::MAX, last: true, checksum: u64::MAX, weight: Some(0.0) };
        let shares = vec![share; steadfast_common::job::spec::LANES_MAX as usize];
        let name =
            LaneContribution { version: u64::MAX, lane: u32::MAX, shares, reductions: u32::MAX };
        let header = PushHeader { name: Some(Name::Lanes(name)), ..PushHeader::default() };
        let message = PushRequest { header: Some(header), blocks: Vec::new() };
        assert_eq!(read(&framed(&message), &[]).unwrap(), expected(&[message]));
    }

    /// Protocol Buffers allows fields in any order, and unknown fields of later versions.
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
            &[0x12, 0],             // an empty block
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
        // A block longer than its message.
        assert_eq!(code(&[0, 0, 0, 0, 2, 0x12, 9]), tonic::Code::InvalidArgument);
    }
}

// Walks through an Ethernet frame and says what its next bytes are. Frames that bear the tag go on
// with bursts after their headers; all others are raw bytes.
//
// The headers are never changed. So the receiver finds the same tag, and the number of values from
// the length in the IPv4 header, which stays that of the uncompressed packet. A frame is compressed
// if all of this holds:
//   - EtherType IPv4 without a VLAN tag, no IP options, no fragment, TCP or UDP;
//   - the DSCP (upper six bits of the type of service) is that of TAG. The lower two bits are ECN,
//     which switches may set on the way;
//   - the payload of TCP or UDP has whole float32 values, at least one.
module gw_packet_steps #(
    parameter logic [7:0] TAG = 8'h28
) (
    input  logic         clk,
    input  logic         rst,
    input  logic [271:0] bytes,
    input  logic [  5:0] available,
    input  logic         ended,
    output logic         step_raw,
    output logic [  5:0] step_raw_size,
    output logic [  3:0] step_present,
    output logic         step_last,
    output logic         step_padding,
    input  logic         taken,
    input  logic         finished,
    input  logic [  5:0] take
);
    // Ethernet and IPv4 headers are 34 bytes, all that the window shows. Then comes the header of TCP
    // or UDP, at most 60 bytes: in two steps if it has more than 34.
    typedef enum logic [2:0] {
        ADDRESSES,
        TRANSPORT,
        OPTIONS,
        VALUES,
        UNCHANGED
    } state_t;
    state_t state, next;

    // Ethernet and IPv4, where `bytes` begins with the frame. Byte 0 is lowest.
    wire udp = bytes[23*8+:8] == 8'd17;
    wire tcp = bytes[23*8+:8] == 8'd6;
    wire [15:0] ip_length = {bytes[16*8+:8], bytes[17*8+:8]};
    wire fragment = bytes[20*8+:6] != 6'd0 || bytes[21*8+:8] != 8'd0;  // offset or more fragments
    wire is_tagged = available >= 6'd24 && bytes[12*8+:16] == 16'h0008 && bytes[14*8+:8] == 8'h45
        && bytes[15*8+2+:6] == TAG[7:2] && ip_length >= 16'd20 && !fragment && (udp || tcp);
    wire unused = &{1'b0, bytes};  // other fields
    logic is_udp;
    logic [15:0] ip_payload;  // header and payload of TCP or UDP

    // TCP or UDP, where `bytes` begins with its header. TCP's says how long it is; 20 bytes stand for
    // a header that ends before that, so that the gate refuses the frame.
    wire [5:0] tcp_header = available >= 6'd13 ? {bytes[12*8+4+:4], 2'd0} : 6'd20;
    wire [5:0] header = is_udp ? 6'd8 : tcp_header;
    wire [15:0] payload = ip_payload - {10'd0, header};
    wire compressible = (is_udp || header >= 6'd20) && ip_payload > {10'd0, header}
        && payload[1:0] == 2'd0;
    logic [5:0] options;  // bytes of the header beyond the first 34
    logic [13:0] values;  // that are still to come

    wire long_header = header > 6'd34;

    always_comb begin
        step_raw      = 1'b1;
        step_raw_size = available;
        step_present  = values > 14'd8 ? 4'd8 : values[3:0];
        step_last     = ended;
        next          = UNCHANGED;
        unique case (state)
            ADDRESSES:
            if (is_tagged) begin
                step_raw_size = 6'd34;
                step_last = 1'b0;
                next = TRANSPORT;
            end
            TRANSPORT:
            if (compressible) begin
                step_raw_size = long_header ? 6'd34 : header;
                step_last = 1'b0;
                next = long_header ? OPTIONS : VALUES;
            end
            OPTIONS: begin
                step_raw_size = options;
                step_last = 1'b0;
                next = VALUES;
            end
            VALUES: begin
                step_raw = 1'b0;
                step_last = values <= 14'd8;
                next = VALUES;
            end
            default: ;
        endcase
    end

    always_ff @(posedge clk) begin
        if (rst || finished) state <= ADDRESSES;
        else if (taken) state <= next;

        if (taken) begin
            unique case (state)
                ADDRESSES: begin
                    is_udp <= udp;
                    ip_payload <= ip_length - 16'd20;
                end
                TRANSPORT: begin
                    options <= header - 6'd34;
                    values  <= payload[15:2];
                end
                VALUES:  values <= values - 14'd8;
                default: ;
            endcase
        end
    end

    // A frame has at least 60 bytes without its checksum; the sender's MAC fills it with zeros.
    logic [5:0] position;  // of the next byte in the frame, or 63
    wire [6:0] next_position = {1'b0, position} + {1'b0, take};
    always_ff @(posedge clk) begin
        if (rst || finished) position <= 6'd0;
        else if (taken) position <= next_position > 7'd63 ? 6'd63 : next_position[5:0];
    end
    assign step_padding = {1'b0, position} + {1'b0, available} == 7'd60;
endmodule
